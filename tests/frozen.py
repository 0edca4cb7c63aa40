"""Leaves what a server that forks has imported out of garbage collections: each process of vLLM's makes several of them."""

from __future__ import annotations

import atexit
import gc

gc.collect()
gc.freeze()
# Collected at the end of the server, else Triton's bindings tell of leaks; not at the end of each engine, which asks for it.
atexit.register(gc.unfreeze)
gc.unfreeze = lambda: None
