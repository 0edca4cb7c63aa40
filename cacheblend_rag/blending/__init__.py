"""Blends, for every engine: what to reuse, which tokens to recompute, and the passes that do it (paper section 4)."""
