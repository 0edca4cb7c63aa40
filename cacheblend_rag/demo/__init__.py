"""The bundled demo: a small model trained from scratch, a fictional corpus and the generator behind both."""
