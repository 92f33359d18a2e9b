"""Vision towers: images as patches, and their embeddings, through transformers."""
