"""Training of the bundled model: tokenizer, initialisation, training loop, evaluation."""
