"""Models' forms of tool calls: incremental parsers, and grammars that constrain a model to them."""
