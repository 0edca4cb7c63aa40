"""Finds the chunks nearest to a question: extracts text from files, splits the text, embeds and indexes the chunks."""
