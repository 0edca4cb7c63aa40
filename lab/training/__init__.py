"""Makes the bundled model and corpus: generation, tokenizer, training, evaluation. Not part of the wheel."""
