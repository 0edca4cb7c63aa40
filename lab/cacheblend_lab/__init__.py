"""Measures and trains for the package `cacheblend_rag`: benchmarks, evaluation, figures, tuned retrievers, REALM."""
