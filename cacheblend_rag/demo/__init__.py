"""Bundles a small model, a fictional corpus, and a comparison of all methods on it."""
