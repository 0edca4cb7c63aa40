"""The tests of this folder need vLLM: without vLLM none of them is collected."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
