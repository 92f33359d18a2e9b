"""Checks a machine, or one engine's pod, before a start and names the remedies.

Imports servers and sockets.
"""
