"""Trains REALM (arXiv 2002.08909): a retriever that learns what helps its encoder fill masks and find answers."""
