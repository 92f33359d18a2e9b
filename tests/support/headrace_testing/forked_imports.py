"""What the fork server of gateways and engines imports before it forks.

Only the server may import this: it exempts all objects alive from garbage collection.
"""

import gc

import llguidance  # noqa: F401
import opentelemetry.exporter.prometheus  # noqa: F401

import headrace_engine.__main__
import headrace_engine.attention.cpu
import headrace_engine.models.native  # noqa: F401
import headrace_gateway.__main__  # noqa: F401

# Each process collects garbage once at its start. It would visit, and so copy, all of these.
gc.collect()
gc.freeze()
