"""What a blend computes on a GPU besides the model, in Triton: stored KV put in its place, attention of scattered queries.

Both have a definition in plain torch, which a CPU runs, and which the tests and the engines' own checks hold them to.
"""
