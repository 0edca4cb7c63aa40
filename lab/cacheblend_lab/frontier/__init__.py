"""Measures how near blends come to full recompute, and at what compute: many prompts at once, on one model."""
