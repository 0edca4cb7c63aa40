"""Blends prompts for every engine: reuses stored KV, selects and recomputes stale tokens (paper section 4)."""
