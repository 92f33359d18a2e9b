"""All Kubernetes I/O: objects, the lease, the drain of an engine.

Imports names and errors.
"""
