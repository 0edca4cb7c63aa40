"""Places stored KV and computes attention of scattered queries on a GPU, by Triton kernels.

Each kernel has an equivalent in plain torch, which runs on a CPU; the tests and the engines' own checks compare both.
"""
