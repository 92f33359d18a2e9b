"""Shows and repairs the queues of a running system, reports and exports their usage.

Imports servers and datadir.
"""
