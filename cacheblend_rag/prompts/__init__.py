"""Prompts made of text and chunks: chunks, templates, token ids, and finding known chunks in plain text."""
