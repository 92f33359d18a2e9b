"""Turns logits into tokens: processors, top-k/top-p, random sampling, log probabilities; and
pooling.

Imports operators and the subpackages below it.
"""
