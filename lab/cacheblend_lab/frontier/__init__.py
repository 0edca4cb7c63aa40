"""Measures agreement of blends with full recompute, and their compute, for many prompts at once on one model."""
