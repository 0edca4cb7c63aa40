"""Finds the chunks nearest to a question: extracts text from files, cuts it, embeds chunks, keeps the index."""
