"""Tensor parallelism: one engine over several processes of one machine, a rank each.

Rank 0 schedules, samples and speaks to the queue; the others hold their part of weights and KV
cache and compute what they are told. Knows nothing of requests.
"""
