"""Simulated load and engines in real time, whose number the operator on the cluster decides.

The simulator computes requests and engines. Instead of `decide` it asks the cluster for the number
of engines, and its signals are answers of a Prometheus that the operator reads.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs

from headrace_operator.scaling import ScalingObservation
from headrace_operator.signals.prometheus import queries
from headrace_operator.simulation.engine_profile import EngineProfile
from headrace_operator.simulation.workload import Trace


def faster(trace: Trace, times: float) -> Trace:
    """The trace in a part of the time."""
    return replace(trace, arrivals=trace.arrivals / times)


def faster_engine(engine: EngineProfile, times: float, start: float) -> EngineProfile:
    """An engine that computes so many times as fast, and starts in `start` seconds."""
    return replace(
        engine,
        prefill_tokens_per_second=engine.prefill_tokens_per_second * times,
        decode_step={size: took / times for size, took in engine.decode_step.items()},
        cold_start_seconds=start,
    )


class ClusterScaler:
    """Sets the count that `count` reads from the cluster, at the real time of each moment.

    `shown` is the latest observation; `counts` are the seconds since the start and the counts.
    """

    name = "cluster"
    interval = 1.0

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count
        self._began = time.monotonic()
        self.shown: ScalingObservation | None = None
        self.counts: list[tuple[float, int]] = []

    def replicas(self, seen: ScalingObservation, now: float) -> int:
        self.shown = seen
        time.sleep(max(0.0, self._began + now - time.monotonic()))
        count = self._count()
        self.counts.append((now, count))
        return count


class SignalServer:
    """A Prometheus that answers the operator's queries for a model with what is shown."""

    def __init__(self, model: str, shown: Callable[[], ScalingObservation | None]) -> None:
        names = {text: name for name, text in queries(model).items()}

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                value = signals(shown()).get(names[form["query"][0]])
                found = [] if value is None else [{"value": [time.time(), str(value)]}]
                body = json.dumps({"status": "success", "data": {"result": found}}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: object) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("0.0.0.0", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="signals")

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def signals(seen: ScalingObservation | None) -> dict[str, float | None]:
    """The values of an observation by the names of the operator's queries. Before the first one
    there is an empty queue with an unknown rate of arrivals, from which nothing is learned."""
    if seen is None or seen.queue is None:
        return {"at": time.time(), "waiting": 0.0}
    queue, engines = seen.queue, seen.engines
    values: dict[str, float | None] = {
        "at": time.time(),
        "waiting": queue.waiting,
        "waiting_tokens": queue.waiting_tokens,
        "pending": queue.pending,
        "oldest_age": queue.oldest_age,
        "arrivals": queue.arrival_rate,
    }
    if engines is not None:
        prefill, requests = engines.prefill_seconds, engines.requests_per_second
        values |= {
            "running": engines.running,
            "engines": seen.ready,
            "capacity": engines.capacity / seen.ready,
            "kv_utilization": engines.kv_utilization,
            "tokens": engines.tokens_per_second,
            "output_tokens": engines.output_tokens_per_second,
            "requests": requests,
            "prefill": None if prefill is None or requests is None else prefill * requests,
        }
    return values
