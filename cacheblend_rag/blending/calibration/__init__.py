"""Which check layers and which recompute ratio suit a model, measured on prompts."""
