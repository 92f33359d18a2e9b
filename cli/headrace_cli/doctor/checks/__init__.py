"""The checks of `headrace doctor`: one file for each part of a machine."""
