"""What all processes share: queue protocol, wire format, settings, text, observability.

Imports no other package and no torch.
"""
