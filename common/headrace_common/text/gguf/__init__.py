"""GGUF files: a checkpoint's small files, made from the metadata of the one file that it has."""
