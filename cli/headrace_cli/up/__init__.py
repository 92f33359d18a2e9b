"""`headrace up`: which processes run with which settings, and the order of start and drain.

Imports processes and servers.
"""
