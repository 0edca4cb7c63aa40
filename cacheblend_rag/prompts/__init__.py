"""Makes prompts of text and chunks: chunks, templates, token ids, and known chunks found in plain text."""
