"""The server's routes need vLLM: without vLLM their tests are not collected."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_http.py"]
