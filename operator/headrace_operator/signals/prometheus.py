"""Signals from a Prometheus server that scrapes gateways and engines."""

import asyncio
import json
import math
from collections.abc import Sequence

import aiohttp

from headrace_common.observability import metric_names as metrics

from ..desired.autoscaler import escaped
from ..errors import SignalsUnavailable
from ..scaling.observation import EngineSignals, LowPrioritySignals, QueueSignals
from ..spec.model_service import ModelService
from ..spec.prometheus_urls import PrometheusUrls, shown
from . import fetch
from .signals import ENDED, SPENT, PodAddress, Signals, capacity_of_one, mean_prefill

RATE_WINDOW = "1m"
MAX_ANSWER_BYTES = 2**20  # of one value


def queries(model: str) -> dict[str, str]:
    """PromQL by the name of its value. All gateways report the same queue: max, not sum."""
    label = f'gen_ai_request_model="{escaped(model)}"'
    depth = f"{metrics.QUEUE_DEPTH.prometheus_name}{{{label}}}"
    running = f'{metrics.ENGINE_REQUESTS.prometheus_name}{{{label},state="running"}}'
    return {
        "at": f"max(timestamp({depth}))",
        "waiting": f"max({depth})",
        "waiting_tokens": f"max({metrics.QUEUE_TOKENS.prometheus_name}{{{label}}})",
        "pending": f"max({metrics.QUEUE_PENDING.prometheus_name}{{{label}}})",
        "oldest_age": f"max({metrics.QUEUE_OLDEST_AGE.prometheus_name}{{{label}}})",
        "low_waiting": f"max({metrics.QUEUE_LOW_PRIORITY_DEPTH.prometheus_name}{{{label}}})",
        "low_pending": f"max({metrics.QUEUE_LOW_PRIORITY_PENDING.prometheus_name}{{{label}}})",
        "low_time_used": f"max({metrics.QUEUE_LOW_PRIORITY_TIME_USED.prometheus_name}{{{label}}})",
        "low_arrivals": _rate(f"{metrics.QUEUE_LOW_PRIORITY_ADMITTED.prometheus_name}{{{label}}}"),
        "others_oldest_age": f"max({metrics.QUEUE_OTHERS_OLDEST_AGE.prometheus_name}{{{label}}})",
        "batches_behind": f"max({metrics.BATCH_BEHIND.prometheus_name}{{{label}}})",
        "arrivals": _rate(f"{metrics.QUEUE_ADMITTED.prometheus_name}{{{label}}}"),
        "running": f"sum({running})",
        "engines": f"count({running})",
        "capacity": f"avg({metrics.ENGINE_CAPACITY.prometheus_name}{{{label}}})",
        "kv_utilization": f"avg({metrics.ENGINE_KV_UTILIZATION.prometheus_name}{{{label}}})",
        "tokens": _rate(f"{metrics.ENGINE_TOKENS.prometheus_name}{{{label}}}"),
        "output_tokens": _rate(f'{metrics.ENGINE_TOKENS.prometheus_name}{{{label},type="output"}}'),
        "requests": _rate(f'{ENDED}{{{label},phase="decode"}}'),
        "prefill": _rate(f'{SPENT}{{{label},phase="prefill"}}'),
    }


def _rate(series: str) -> str:
    return f"sum(rate({series}[{RATE_WINDOW}]))"


class PrometheusSignals:
    """A SignalSource. `urls.own` serves ModelServices that name no Prometheus of their own.

    URLs that `urls` trusts are queried over `session`, all others over `remote`.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        remote: aiohttp.ClientSession,
        urls: PrometheusUrls,
        *,
        timeout: float,
    ) -> None:
        self._session = session
        self._remote = remote
        self._urls = urls
        self._timeout = aiohttp.ClientTimeout(total=timeout)

    async def read(self, service: ModelService, pods: Sequence[PodAddress]) -> Signals:
        url = service.spec.scaling.prometheus_url or self._urls.own
        assert url is not None, "the caller asks only where there is a Prometheus"
        wanted = queries(service.served_name)
        answers = await asyncio.gather(*(self._query(url, text) for text in wanted.values()))
        values = dict(zip(wanted, answers, strict=True))
        if values["at"] is None:
            raise SignalsUnavailable(
                f"prometheus at {shown(url)} has no {metrics.QUEUE_DEPTH.prometheus_name} "
                f"of model {service.served_name!r}: does it scrape the gateways?"
            )
        return _signals(values["at"], values, capacity_of_one(service))

    def forget(self, key: tuple[str, str]) -> None:
        """Does nothing: no state is kept between two readings."""

    async def _query(self, url: str, text: str) -> float | None:
        session = self._session if self._urls.trusts(url) else self._remote
        request = session.post(
            f"{url.rstrip('/')}/api/v1/query",
            data={"query": text},
            timeout=self._timeout,
            allow_redirects=False,
        )
        try:
            return value_of(await fetch.body(request, MAX_ANSWER_BYTES))
        except SignalsUnavailable as error:
            raise SignalsUnavailable(f"prometheus at {shown(url)}: {error}") from error


def value_of(answer: bytes) -> float | None:
    """The value of an instant query; None if there is none. Raises SignalsUnavailable."""
    try:
        result = json.loads(answer)["data"]["result"]
        value = float(result[0]["value"][1]) if result else math.nan
    except (LookupError, TypeError, ValueError, ArithmeticError, RecursionError):
        raise SignalsUnavailable("the answer is not one to a query") from None
    return value if math.isfinite(value) else None


def _signals(at: float, values: dict[str, float | None], capacity: int) -> Signals:
    """The values as signals. `capacity` is a guess for one engine until engines report it."""

    def number(name: str) -> float:
        return values[name] or 0.0

    queue = QueueSignals(
        waiting=int(number("waiting")),
        waiting_tokens=int(number("waiting_tokens")),
        pending=int(number("pending")),
        oldest_age=number("oldest_age"),
        arrival_rate=values["arrivals"],
        low_priority=None
        if values["low_waiting"] is None
        else LowPrioritySignals(
            waiting=int(number("low_waiting")),
            pending=int(number("low_pending")),
            arrival_rate=number("low_arrivals"),
            time_used=number("low_time_used"),
            batches_behind=int(number("batches_behind")),
            others_oldest_age=number("others_oldest_age"),
        ),
    )
    engines = None
    if values["engines"]:
        engines = EngineSignals(
            running=int(number("running")),
            capacity=round((values["capacity"] or capacity) * number("engines")),
            kv_utilization=min(1.0, number("kv_utilization")),
            requests_per_second=values["requests"],
            tokens_per_second=values["tokens"],
            output_tokens_per_second=values["output_tokens"],
            prefill_seconds=mean_prefill(values["prefill"], values["requests"]),
        )
    return Signals(at=at, queue=queue, engines=engines)
