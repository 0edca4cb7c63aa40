"""What the token choice rests on, one thing at a time: `python -m cacheblend_rag.lab.evaluation.ablation`."""
