"""Draft heads: one layer that predicts further tokens from the hidden states of its target."""
