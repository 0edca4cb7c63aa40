"""Makes the bundled model and corpus: generation, tokenizer, training, evaluation. The wheel does not include it."""
