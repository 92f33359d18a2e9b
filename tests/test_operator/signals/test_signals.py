"""Signals from metrics pages, over real HTTP, and from Prometheus' answers."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from headrace_operator.errors import SignalsUnavailable
from headrace_operator.scaling import LowPrioritySignals
from headrace_operator.signals import fetch
from headrace_operator.signals.prometheus import PrometheusSignals, queries, value_of
from headrace_operator.signals.scrape import ScrapedSignals, parse
from headrace_operator.signals.signals import Counters, PodAddress, gateway_counters, rates
from headrace_operator.spec.prometheus_urls import PrometheusUrls
from headrace_testing.model_services import service

MODEL = 'gen_ai_request_model="qwen"'


def gateway_page(waiting: int, admitted: int = 0) -> str:
    return f"""# TYPE headrace_queue_depth gauge
headrace_queue_depth{{{MODEL}}} {waiting}
headrace_queue_depth{{gen_ai_request_model="other"}} 999
# TYPE headrace_queue_tokens gauge
headrace_queue_tokens{{{MODEL}}} {waiting * 100}
# TYPE headrace_queue_pending gauge
headrace_queue_pending{{{MODEL}}} 3
# TYPE headrace_queue_oldest_age_seconds gauge
headrace_queue_oldest_age_seconds{{{MODEL}}} 1.5
# TYPE headrace_queue_admitted counter
headrace_queue_admitted_total{{{MODEL}}} {admitted}
"""


def engine_page(
    running: int, tokens: int = 0, ended: int = 0, capacity: str = "", prefill: float = 0.0
) -> str:
    return f"""{capacity}# TYPE headrace_engine_requests gauge
headrace_engine_requests{{{MODEL},state="running"}} {running}
headrace_engine_requests{{{MODEL},state="waiting"}} 50
# TYPE headrace_engine_kv_utilization gauge
headrace_engine_kv_utilization{{{MODEL}}} 0.5
# TYPE headrace_engine_kv_blocks gauge
headrace_engine_kv_blocks{{{MODEL},state="cached",place="device"}} 77
headrace_engine_kv_blocks{{{MODEL},state="cached",place="host"}} 5
# TYPE headrace_engine_tokens counter
headrace_engine_tokens_total{{{MODEL},type="input"}} {tokens}
headrace_engine_tokens_total{{{MODEL},type="output"}} {tokens}
# TYPE headrace_engine_request_phase_duration_seconds histogram
headrace_engine_request_phase_duration_seconds_bucket{{{MODEL},phase="decode",le="+Inf"}} {ended}
headrace_engine_request_phase_duration_seconds_count{{{MODEL},phase="decode"}} {ended}
headrace_engine_request_phase_duration_seconds_sum{{{MODEL},phase="decode"}} 1
headrace_engine_request_phase_duration_seconds_bucket{{{MODEL},phase="prefill",le="+Inf"}} {ended}
headrace_engine_request_phase_duration_seconds_count{{{MODEL},phase="prefill"}} {ended}
headrace_engine_request_phase_duration_seconds_sum{{{MODEL},phase="prefill"}} {prefill}
"""


class Pods:
    """The metrics endpoints of pods. `pages` by path can be changed; None answers 500."""

    def __init__(self, port: int, session: aiohttp.ClientSession) -> None:
        self.port = port
        self.session = session
        self.pages: dict[str, str | None] = {}
        self.now = 1000.0

    def address(self, name: str) -> PodAddress:
        return PodAddress(name, f"{name}.localhost", self.port)


@pytest.fixture
async def pods() -> AsyncIterator[Pods]:
    async with serving() as found:
        yield found


@asynccontextmanager
async def serving() -> AsyncIterator[Pods]:
    """One server for all pods, which it distinguishes by the host name of requests."""
    holder: list[Pods] = []

    async def page(request: web.Request) -> web.Response:
        text = holder[0].pages.get(request.host.partition(".")[0])
        return web.Response(text=text) if text is not None else web.Response(status=500)

    app = web.Application()
    app.router.add_get("/metrics", page)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (_, port) = runner.addresses[0][:2]
    connector = aiohttp.TCPConnector(resolver=_Loopback())
    async with aiohttp.ClientSession(connector=connector) as session:
        holder.append(Pods(port, session))
        yield holder[0]
    await runner.cleanup()


class _Loopback(aiohttp.abc.AbstractResolver):
    async def resolve(self, host: str, port: int = 0, family: Any = 0) -> Any:
        return [
            {
                "hostname": host,
                "host": "127.0.0.1",
                "port": port,
                "family": 2,
                "proto": 0,
                "flags": 0,
            }
        ]

    async def close(self) -> None:
        """Does nothing: nothing is open."""


def source(pods: Pods, *gateways: str) -> ScrapedSignals:
    async def listed() -> list[PodAddress]:
        return [pods.address(name) for name in gateways]

    return ScrapedSignals(pods.session, listed, timeout=5, page_limit=2**20, clock=lambda: pods.now)


async def test_the_queue_is_the_same_from_every_gateway_and_right_without_engines(
    pods: Pods,
) -> None:
    pods.pages = {"g1": gateway_page(40), "g2": gateway_page(42)}
    found = await source(pods, "g1", "g2").read(service(), ())
    assert found.queue is not None
    assert (found.queue.waiting, found.queue.waiting_tokens, found.queue.pending) == (42, 4200, 3)
    assert found.queue.oldest_age == 1.5
    assert (found.at, found.engines) == (1000.0, None)


async def test_engines_are_summed(pods: Pods) -> None:
    pods.pages = {"g1": gateway_page(0), "e1": engine_page(10), "e2": engine_page(20)}
    engines = [pods.address("e1"), pods.address("e2")]
    found = await source(pods, "g1").read(service(), engines)
    assert found.engines is not None
    assert (found.engines.running, found.engines.capacity) == (30, 128)
    assert found.engines.kv_utilization == 0.5
    assert found.cached_blocks == {"e1": 77, "e2": 77}


async def test_the_capacity_comes_from_the_settings(pods: Pods) -> None:
    pods.pages = {"g1": gateway_page(0), "e1": engine_page(1)}
    own = service(engine={"settings": {"maxNumSeqs": 8}})
    found = await source(pods, "g1").read(own, [pods.address("e1")])
    assert found.engines is not None
    assert found.engines.capacity == 8


async def test_the_capacity_comes_from_the_engines_reports(pods: Pods) -> None:
    page = f"# TYPE headrace_engine_capacity gauge\nheadrace_engine_capacity{{{MODEL}}} 16\n"
    pods.pages = {"g1": gateway_page(0), "e1": engine_page(1), "e2": engine_page(1, capacity=page)}
    engines = [pods.address("e1"), pods.address("e2")]
    found = await source(pods, "g1").read(service(), engines)
    assert found.engines is not None
    assert found.engines.capacity == 64 + 16


async def test_rates_come_from_two_readings(pods: Pods) -> None:
    signals = source(pods, "g1")
    engines = [pods.address("e1")]
    pods.pages = {"g1": gateway_page(0, admitted=10), "e1": engine_page(1, 100, 5)}
    await signals.read(service(), engines)
    pods.now += 10
    pods.pages = {"g1": gateway_page(0, admitted=30), "e1": engine_page(1, 600, 15, prefill=4.0)}
    found = await signals.read(service(), engines)
    assert found.queue is not None and found.engines is not None
    assert found.queue.arrival_rate == 2.0
    assert found.engines.tokens_per_second == 100.0
    assert found.engines.requests_per_second == 1.0
    assert found.engines.output_tokens_per_second == 50.0
    assert found.engines.prefill_seconds == 0.4


async def test_arrivals_are_unknown_while_a_gateway_is_silent(pods: Pods) -> None:
    signals = source(pods, "g1", "g2")
    pods.pages = {"g1": gateway_page(0, 10), "g2": gateway_page(0, 10)}
    await signals.read(service(), ())
    pods.now += 10
    pods.pages["g2"] = None
    found = await signals.read(service(), ())
    assert found.queue is not None
    assert found.queue.arrival_rate is None


async def test_old_signals_keep_their_time(pods: Pods) -> None:
    signals = source(pods, "g1")
    pods.pages = {"g1": gateway_page(7)}
    await signals.read(service(), ())
    pods.now += 90
    pods.pages = {"g1": None}
    found = await signals.read(service(), ())
    assert found.queue is not None
    assert (found.at, found.queue.waiting) == (1000.0, 7)


@pytest.mark.parametrize(
    ("pages", "gateways", "why"),
    [
        ({}, (), "no gateway pod is running"),
        ({"g1": None}, ("g1",), "none of 1 gateway pods gives .*HTTP status 500"),
        ({"g1": "# nothing\n"}, ("g1",), "no gateway serves a model named 'qwen'"),
    ],
)
async def test_missing_signals_have_a_reason(
    pods: Pods, pages: dict[str, str | None], gateways: tuple[str, ...], why: str
) -> None:
    pods.pages = pages
    with pytest.raises(SignalsUnavailable, match=why):
        await source(pods, *gateways).read(service(), ())


async def test_an_invalid_page_counts_as_no_answer(pods: Pods) -> None:
    pods.pages = {"g1": "<html>", "g2": gateway_page(3)}
    found = await source(pods, "g1", "g2").read(service(), ())
    assert found.queue is not None
    assert found.queue.waiting == 3


def test_a_counter_that_fell_was_reset() -> None:
    before = {"p": Counters(at=0, values={"tokens": 500})}
    after = {"p": Counters(at=10, values={"tokens": 40})}
    assert rates(before, after) == {"tokens": 4.0}
    assert rates({}, after) == {}


def test_pages_are_parsed_by_sample_name() -> None:
    assert parse(gateway_page(1, 5), "qwen")["headrace_queue_admitted_total"] == [
        ({"gen_ai_request_model": "qwen"}, 5.0)
    ]


def test_values_that_are_not_numbers_count_as_absent() -> None:
    page = gateway_page(1).replace("1.5", "+Inf")
    assert "headrace_queue_oldest_age_seconds" not in parse(page, "qwen")
    assert value_of(_answer("+Inf")) is None
    assert value_of(_answer("NaN")) is None


def _answer(value: str) -> bytes:
    return json.dumps({"data": {"result": [{"value": [0, value]}]}}).encode()


@asynccontextmanager
async def prometheus(values: dict[str, float]) -> AsyncIterator[PrometheusSignals]:
    """A server that answers the queries named in `values`, and the others with nothing."""
    texts = {text: name for name, text in queries("qwen").items()}

    async def answer(request: web.Request) -> web.Response:
        query = texts[str((await request.post())["query"])]
        found = [{"value": [0, str(values[query])]}] if query in values else []
        return web.json_response({"status": "success", "data": {"result": found}})

    app = web.Application()
    app.router.add_post("/api/v1/query", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with fetch.session() as session:
        yield PrometheusSignals(session, session, PrometheusUrls(own=url), timeout=5)
    await runner.cleanup()


async def test_prometheus_gives_the_same_signals() -> None:
    values = {"at": 990.0, "waiting": 5, "arrivals": 2.5, "running": 7, "engines": 2, "tokens": 80}
    async with prometheus(values) as signals:
        found = await signals.read(service(), ())
    assert found.queue is not None and found.engines is not None
    assert (found.at, found.queue.waiting, found.queue.arrival_rate) == (990.0, 5, 2.5)
    assert (found.engines.running, found.engines.capacity) == (7, 128)
    assert found.engines.tokens_per_second == 80
    assert found.engines.prefill_seconds is None
    more = {"capacity": 16, "output_tokens": 30, "requests": 2, "prefill": 0.5}
    async with prometheus({**values, **more}) as signals:
        found = await signals.read(service(), ())
    assert found.engines is not None
    assert found.engines.capacity == 32
    assert found.engines.output_tokens_per_second == 30
    assert found.engines.prefill_seconds == 0.25


LOW_PRIORITY = LowPrioritySignals(
    waiting=4,
    pending=2,
    arrival_rate=0.5,
    time_used=0.25,
    batches_behind=1,
    others_oldest_age=1.25,
)


async def test_low_priority_is_read_from_gateways_that_tell_it(pods: Pods) -> None:
    label = f"{{{MODEL}}}"
    page = gateway_page(40) + (
        f"headrace_queue_low_priority_depth{label} 4\n"
        f"headrace_queue_low_priority_pending{label} 2\n"
        f"headrace_queue_low_priority_time_used{label} 0.25\n"
        f"headrace_queue_others_oldest_age_seconds{label} 1.25\n"
        f"headrace_batch_behind{label} 1\n"
    )
    signals = source(pods, "g1")
    pods.pages = {"g1": gateway_page(40)}
    old = await signals.read(service(), ())
    assert old.queue is not None and old.queue.low_priority is None

    pods.pages = {"g1": page}
    found = await signals.read(service(), ())
    assert found.queue is not None
    assert found.queue.low_priority == replace(LOW_PRIORITY, arrival_rate=0.0)


def test_arrivals_of_low_priority_are_a_rate_of_their_own() -> None:
    def counters(at: float, low: int) -> Counters:
        text = f"headrace_queue_low_priority_admitted_total{{{MODEL}}} {low}\n"
        return gateway_counters(parse(gateway_page(1) + text, "qwen"), at)

    assert rates({"g": counters(0, 5)}, {"g": counters(10, 10)})["low_arrivals"] == 0.5


async def test_prometheus_gives_the_same_signals_of_low_priority() -> None:
    values = {"low_waiting": 4, "low_pending": 2, "low_arrivals": 0.5, "low_time_used": 0.25}
    others = {"batches_behind": 1, "others_oldest_age": 1.25}
    async with prometheus({"at": 990.0, "waiting": 5, **values, **others}) as signals:
        found = await signals.read(service(), ())
    assert found.queue is not None and found.queue.low_priority == LOW_PRIORITY


async def test_a_prometheus_without_metrics_of_the_queue_is_reported() -> None:
    async with prometheus({"running": 1}) as signals:
        with pytest.raises(SignalsUnavailable, match="does it scrape the gateways"):
            await signals.read(service(), ())


async def test_an_absent_prometheus_is_reported() -> None:
    async with fetch.session() as session:
        urls = PrometheusUrls(own="http://127.0.0.1:1")
        signals = PrometheusSignals(session, session, urls, timeout=5)
        with pytest.raises(SignalsUnavailable, match=r"prometheus at http://127\.0\.0\.1:1"):
            await signals.read(service(), ())


@pytest.mark.parametrize(
    "answer",
    [b'{"data": {"result": [{}]}}', b"[]", b"secret", b"[" * 100_000, _answer("one"), b"\xff"],
)
def test_an_answer_in_another_format_is_refused_without_quoting_it(answer: bytes) -> None:
    with pytest.raises(SignalsUnavailable) as refusal:
        value_of(answer)
    assert str(refusal.value) == "the answer is not one to a query"
