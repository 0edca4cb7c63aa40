"""Joins retrieval with an engine: indexes documents, asks questions."""
