"""Structured output: grammars compiled for a model's vocabulary, and the tokens they allow."""
