"""The server: vLLM's own OpenAI server on a blending engine, with routes for chunks."""
