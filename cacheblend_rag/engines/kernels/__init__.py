"""Computes on a GPU what a blend needs besides the model, in Triton: placing stored KV, attention of scattered queries.

Both have a definition in plain torch, which a CPU runs, and which the tests and the engines' own checks hold them to.
"""
