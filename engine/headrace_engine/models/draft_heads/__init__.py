"""Draft heads: one layer that predicts further tokens from its target model's hidden states."""
