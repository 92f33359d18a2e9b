"""Vision towers: images as they read them, and their embeddings, through transformers."""
