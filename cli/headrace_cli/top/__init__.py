"""`headrace top`: a live table of a deployment's queues, engines and KV caches.

Imports sse, tables and errors.
"""
