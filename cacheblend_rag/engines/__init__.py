"""Runs models: on transformers, inside vLLM, or on a remote server."""
