"""From files to the chunks nearest to a question: extraction, chunking, embedding, the index."""
