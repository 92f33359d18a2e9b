"""Decides what each step computes: sequences, chunks of prompts, preemption.

Imports core and kv_cache. `Scheduler` leaves it; it runs nothing.
"""
