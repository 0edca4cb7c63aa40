"""The server: vLLM's own OpenAI server on a blending engine, with routes for chunks (issue 3, point 3)."""
