"""Drafts from n-grams, a draft model or a draft head: how many, and which of them are accepted.

Imports core and kv_cache. Draft models and heads run in model_runner.
"""
