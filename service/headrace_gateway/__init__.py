"""The gateway: HTTP to clients, the queue to engines. It runs no model.

Of the other packages, it imports only headrace_common.
"""
