"""The embedded queue server, and checks of a running server.

Imports processes.
"""
