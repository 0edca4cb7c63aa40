"""Retrieval joined with an engine: index documents, ask questions."""
