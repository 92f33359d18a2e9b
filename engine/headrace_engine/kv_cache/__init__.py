"""KV blocks and block tables, prefix caching, blocks in host memory, and how many blocks fit.

Imports core. The scheduler owns what leaves it.
"""
