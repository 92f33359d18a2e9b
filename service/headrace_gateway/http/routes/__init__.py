"""Routes: one file for each group of paths."""
