"""Limits for the processes under attack: memory, and the time of answers."""

MIB = 2**20
# Memory limits. Gateways and Redis have those of the chart. Engines have a small one, since the CRD
# sets none.
GATEWAY_BYTES = 1024 * MIB
REDIS_BYTES = 1024 * MIB
ENGINE_BYTES = 2048 * MIB
# The largest share of its memory limit that a process may use.
MAX_MEMORY_SHARE = 0.5
DESCRIPTORS = 256
# The maxMemory of the chart's Redis.
REDIS_MEMORY = "384mb"
# Seconds that the gateway waits for a slow client; short, so that the attacks do not take long.
PATIENCE_S = 5

PROBE_INTERVAL_S = 0.5
PROBE_LIMIT_S = 1.0
ANSWER_LIMIT_S = 10.0
# The longest time that the event loop may be blocked.
STALL_LIMIT_S = 1.0
# The other tenant's p99 latency under attack may be LATENCY_FACTOR times the undisturbed one, or
# the undisturbed one plus LATENCY_ALLOWANCE_S if that is more: other programs use the processors
# too.
LATENCY_FACTOR = 2.0
LATENCY_ALLOWANCE_S = 0.25
