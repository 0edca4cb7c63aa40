"""Builds prompts from text and chunks: chunks, templates, token ids, and a search for known chunks in plain text."""
