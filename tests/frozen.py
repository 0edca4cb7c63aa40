"""Excludes the imports of a fork server from garbage collections, which each process of vLLM runs several times."""

from __future__ import annotations

import atexit
import gc

gc.collect()
gc.freeze()
# Objects are collected at the end of the server, otherwise Triton's bindings report leaks, but not at the end of each engine.
atexit.register(gc.unfreeze)
gc.unfreeze = lambda: None
