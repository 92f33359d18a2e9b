"""Drafts from n-grams or a draft model: how many, and which of them are accepted.

Imports core and kv_cache. The draft model itself runs in model_runner.
"""
