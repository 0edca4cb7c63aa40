"""Bundles a small model, a fictional corpus, and the methods that are compared on it."""
