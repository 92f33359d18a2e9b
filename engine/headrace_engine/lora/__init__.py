"""LoRA adapters: small differences of a model's weights, several of them in one batch."""
