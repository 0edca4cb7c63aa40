"""Bundles a small model, a fictional corpus, and the methods that the demo compares on the corpus."""
