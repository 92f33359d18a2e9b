"""`LLM`: the engine as a library, without Redis.

Imports engine and model_runner.
"""
