"""The server's routes come with vLLM: without it there is nothing of them to try."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_http.py"]
