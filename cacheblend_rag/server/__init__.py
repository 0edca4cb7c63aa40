"""Serves the OpenAI API with vLLM's own server, a blending engine, and routes for chunks."""
