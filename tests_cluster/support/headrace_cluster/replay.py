"""Simulated load and engines in real time, whose number the operator on the cluster decides.

The simulator computes requests and engines. Instead of `decide` it asks the cluster for the number
of engines, and its signals are answers of a Prometheus that the operator reads.
"""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from urllib.parse import parse_qs

from headrace_operator.scaling import EngineSignals, QueueSignals, ScalingObservation
from headrace_operator.signals.prometheus import queries
from headrace_operator.simulation.engine_profile import EngineProfile
from headrace_operator.simulation.workload import Trace
from headrace_testing.threaded_server import ScriptedHandler, ThreadedServer


def faster(trace: Trace, times: float) -> Trace:
    """The trace in a part of the time."""
    return replace(trace, arrivals=trace.arrivals / times)


def faster_engine(engine: EngineProfile, times: float, start: float) -> EngineProfile:
    """An engine that computes `times` as fast, and starts in `start` seconds."""
    return replace(
        engine,
        prefill_tokens_per_second=engine.prefill_tokens_per_second * times,
        decode_step={size: took / times for size, took in engine.decode_step.items()},
        cold_start_seconds=start,
    )


class ClusterScaler:
    """Sets the count that `count` reads from the cluster, at the real time of each moment.

    `began` is the start on the monotonic clock, to be set before the simulation. `shown` is the
    observation of the present moment, `counts` the seconds since the start with the counts.
    """

    name = "cluster"
    interval = 0.25

    def __init__(self, count: Callable[[], int], engine: EngineProfile) -> None:
        self._count = count
        self.began = 0.0
        self.shown = idle(engine)
        self.counts: list[tuple[float, int]] = []

    def replicas(self, seen: ScalingObservation, now: float) -> int:
        time.sleep(max(0.0, self.began + now - time.monotonic()))
        self.shown = seen
        count = self._count()
        self.counts.append((now, count))
        return count


class SignalServer(ThreadedServer):
    """A Prometheus that answers the operator's queries for a model with what `observe` returns.

    `observe` is called once for each reading, which asks every query once. `readings` are the times
    of the monotonic clock at which the operator read its signals, and what it read.
    """

    def __init__(self, model: str, observe: Callable[[], ScalingObservation]) -> None:
        super().__init__(_Answers, "0.0.0.0")
        self.readings: list[tuple[float, ScalingObservation]] = []
        self._names = {text: name for name, text in queries(model).items()}
        self._observe = observe
        self._unasked: set[str] = set()
        self._lock = Lock()

    def value(self, query: str) -> float | None:
        name = self._names[query]
        with self._lock:
            if name not in self._unasked:
                self.readings.append((time.monotonic(), self._observe()))
                self._unasked = set(self._names.values())
            self._unasked.remove(name)
            return signals(self.readings[-1][1]).get(name)


class _Answers(ScriptedHandler[SignalServer]):
    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        value = self.script.value(form["query"][0])
        found = [] if value is None else [{"value": [time.time(), str(value)]}]
        body = json.dumps({"status": "success", "data": {"result": found}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def idle(engine: EngineProfile) -> ScalingObservation:
    """An engine that runs nothing, as at the start of a simulation. A request is on its way to it,
    so that the operator looks as often as under load."""
    return ScalingObservation(
        at=0.0,
        replicas=1,
        ready=1,
        queue=QueueSignals(waiting=0, pending=1),
        engines=EngineSignals(running=0, capacity=engine.max_num_seqs),
    )


def signals(seen: ScalingObservation) -> dict[str, float | None]:
    """The values of an observation by the names of the operator's queries."""
    queue, engines = seen.queue, seen.engines
    assert queue is not None, "a simulated queue is always seen"
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
