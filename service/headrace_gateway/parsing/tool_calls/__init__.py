"""Models' tool-call formats: incremental parsers, and grammars that constrain a model to them."""
