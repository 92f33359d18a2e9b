"""`headrace bench`: loads any OpenAI server and reports latencies, throughput and goodput.

Imports errors and tables.
"""
