"""Signals from a Prometheus server that scrapes gateways and engines."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import aiohttp

from headrace_common import metric_names as metrics

from .desired.autoscaler import escaped
from .errors import SignalsUnavailable
from .scaling.observation import EngineSignals, QueueSignals
from .signals import PodAddress, Signals, capacity_of_one
from .spec import ModelService

RATE_WINDOW = "1m"


def queries(model: str) -> dict[str, str]:
    """PromQL by the name of its value. Gateways tell the same queue: max, not sum."""
    label = f'gen_ai_request_model="{escaped(model)}"'
    depth = f"{metrics.QUEUE_DEPTH.prometheus_name}{{{label}}}"
    running = f'{metrics.ENGINE_REQUESTS.prometheus_name}{{{label},state="running"}}'
    ended = f"{metrics.ENGINE_REQUEST_PHASE_DURATION.prometheus_name}_count"
    return {
        "at": f"max(timestamp({depth}))",
        "waiting": f"max({depth})",
        "waiting_tokens": f"max({metrics.QUEUE_TOKENS.prometheus_name}{{{label}}})",
        "pending": f"max({metrics.QUEUE_PENDING.prometheus_name}{{{label}}})",
        "oldest_age": f"max({metrics.QUEUE_OLDEST_AGE.prometheus_name}{{{label}}})",
        "arrivals": _rate(f"{metrics.QUEUE_ADMITTED.prometheus_name}{{{label}}}"),
        "running": f"sum({running})",
        "engines": f"count({running})",
        "capacity": f"avg({metrics.ENGINE_CAPACITY.prometheus_name}{{{label}}})",
        "kv_utilization": f"avg({metrics.ENGINE_KV_UTILIZATION.prometheus_name}{{{label}}})",
        "tokens": _rate(f"{metrics.ENGINE_TOKENS.prometheus_name}{{{label}}}"),
        "requests": _rate(f'{ended}{{{label},phase="decode"}}'),
    }


def _rate(series: str) -> str:
    return f"sum(rate({series}[{RATE_WINDOW}]))"


class PrometheusSignals:
    """A SignalSource. `url` serves ModelServices that name no Prometheus of their own."""

    def __init__(self, session: aiohttp.ClientSession, url: str | None, *, timeout: float) -> None:
        self._session = session
        self._url = url
        self._timeout = aiohttp.ClientTimeout(total=timeout)

    async def read(self, service: ModelService, pods: Sequence[PodAddress]) -> Signals:
        url = service.spec.scaling.prometheus_url or self._url
        assert url is not None, "the caller asks only where there is a Prometheus"
        wanted = queries(service.served_name)
        answers = await asyncio.gather(*(self._query(url, text) for text in wanted.values()))
        values = dict(zip(wanted, answers, strict=True))
        if values["at"] is None:
            raise SignalsUnavailable(
                f"prometheus at {url} has no {metrics.QUEUE_DEPTH.prometheus_name} "
                f"of model {service.served_name!r}: does it scrape the gateways?"
            )
        return _signals(values["at"], values, capacity_of_one(service))

    def forget(self, key: tuple[str, str]) -> None:
        """Nothing is kept between two readings."""

    async def _query(self, url: str, text: str) -> float | None:
        target = f"{url.rstrip('/')}/api/v1/query"
        try:
            async with self._session.post(
                target, data={"query": text}, timeout=self._timeout
            ) as reply:
                reply.raise_for_status()
                return value_of(await reply.json())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            problem = str(error) or type(error).__name__
            raise SignalsUnavailable(f"prometheus at {url}: {problem}") from error


def value_of(answer: Any) -> float | None:
    """The one value of an instant query; None where there is none. Raises ValueError."""
    try:
        result = answer["data"]["result"]
        value = float(result[0]["value"][1]) if result else math.nan
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"not an answer to a query: {answer!r:.200}") from error
    return None if math.isnan(value) else value


def _signals(at: float, values: dict[str, float | None], capacity: int) -> Signals:
    """`capacity` is the guess for one engine while none has told its own."""

    def number(name: str) -> float:
        return values[name] or 0.0

    queue = QueueSignals(
        waiting=int(number("waiting")),
        waiting_tokens=int(number("waiting_tokens")),
        pending=int(number("pending")),
        oldest_age=number("oldest_age"),
        arrival_rate=values["arrivals"],
    )
    engines = None
    if values["engines"]:
        engines = EngineSignals(
            running=int(number("running")),
            capacity=round((values["capacity"] or capacity) * number("engines")),
            kv_utilization=min(1.0, number("kv_utilization")),
            requests_per_second=values["requests"],
            tokens_per_second=values["tokens"],
        )
    return Signals(at=at, queue=queue, engines=engines)
