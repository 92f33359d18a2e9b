"""Models' forms of reasoning."""
