"""Shows and repairs the queues of a running system.

Imports servers and datadir.
"""
