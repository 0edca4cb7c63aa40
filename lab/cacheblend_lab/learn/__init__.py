"""Trains a *writer*: a LoRA that acts only while chunks' KV is computed, so that it fits any context; the model stays."""
