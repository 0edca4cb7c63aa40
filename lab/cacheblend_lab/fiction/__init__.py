"""Writes a fictional world: documents that refer to one another, and questions that need them to be followed."""
