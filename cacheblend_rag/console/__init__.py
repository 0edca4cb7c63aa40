"""Holds what every command shares: the root, options, groups of them, output, and how a model is opened."""
