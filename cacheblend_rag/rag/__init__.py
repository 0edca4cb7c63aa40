"""Joins retrieval with an engine: indexes documents and answers questions."""
