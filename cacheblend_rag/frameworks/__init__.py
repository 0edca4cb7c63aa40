"""Serves the packages for LangChain and LlamaIndex: calls, misses, uses of chunks, shared engines."""
