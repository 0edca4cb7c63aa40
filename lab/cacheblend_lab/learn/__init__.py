"""Trains a *writer*: a LoRA that is active only while chunk KV is computed, so that the KV fits any context."""
