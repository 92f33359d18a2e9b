"""KV blocks and block tables, prefix caching, blocks in host memory, and how many blocks fit.

Imports core. The scheduler owns the objects of this package.
"""
