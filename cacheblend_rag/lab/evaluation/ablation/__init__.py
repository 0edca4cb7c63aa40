"""Varies the choice of tokens, one thing at a time: `python -m cacheblend_rag.lab.evaluation.ablation`."""
