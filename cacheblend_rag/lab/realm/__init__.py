"""REALM (Guu et al., arXiv 2002.08909): a retriever that learns from what helps the encoder fill masks and find answers."""
