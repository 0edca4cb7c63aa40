"""Writes a fictional world: documents that refer to one another, and questions that depend on these references."""
