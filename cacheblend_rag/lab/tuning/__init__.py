"""Tunes the retriever by what helps the reader: its likelihood of the answer over each chunk's stored KV (REALM)."""
