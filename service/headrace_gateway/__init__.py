"""The gateway: HTTP to clients, the queue to engines. It runs no model.

Imports headrace_common, no other package.
"""
