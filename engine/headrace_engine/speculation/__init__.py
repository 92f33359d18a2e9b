"""Speculative decoding: cheap proposals for several tokens, checked by the model in one step."""
