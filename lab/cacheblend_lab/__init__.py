"""Measures and trains what the rest of the package serves: benchmarks, evaluation, figures, tuned retrievers, REALM."""
