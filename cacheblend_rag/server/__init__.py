"""Serves OpenAI's API: vLLM's own server on a blending engine, with routes for chunks."""
