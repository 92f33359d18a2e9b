"""Limits for the processes under attack: memory, and the time of answers."""

MIB = 2**20
# The chart's limit of a gateway, and a small one of an engine: its CRD has no default.
GATEWAY_BYTES = 1024 * MIB
ENGINE_BYTES = 2048 * MIB
# The share of its limit that no process may exceed.
SHARE = 0.5
DESCRIPTORS = 256
# The maxMemory of the chart's Redis.
REDIS_MEMORY = "384mb"
# Patience of the gateway with slow clients, so that each of them is answered in time.
PATIENCE_S = 5

PROBE_INTERVAL_S = 0.5
PROBE_LIMIT_S = 1.0
ANSWER_LIMIT_S = 10.0
# No single request of another tenant may wait longer than this for the event loop.
STALL_LIMIT_S = 1.0
# The other tenant's p99 under attack may be this many times the undisturbed one, or this much more,
# as other programs take the processors too.
LATENCY_FACTOR = 2.0
LATENCY_FLOOR_S = 0.25
