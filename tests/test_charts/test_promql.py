"""Every panel's and every rule's PromQL against a real Prometheus over real processes under load.

The processes are a gateway, a gateway with a full queue, an engine, Valkey and its exporter. The
operator's own recorder and exporter are in this process, and record two scalings. ABSENT lists the
metrics that cannot exist here, with the reason; a listed metric that exists fails the test.
"""

import asyncio
import re
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import redis

from dashboards import dashboards
from headrace_common.observability import metric_names as names
from headrace_common.observability import telemetry
from headrace_dashboards.panel import Dashboard, Panel, Variable
from headrace_operator.desired.workloads import WorkloadKind
from headrace_operator.reconciliation import engine_pods
from headrace_operator.reconciliation.recorder import Recorder
from headrace_operator.reconciliation.status import Observations
from headrace_operator.scaling.decision import Decision
from headrace_operator.scaling.history import History
from headrace_operator.scaling.reason import Reason, Signal
from headrace_operator.scaling.signals import Estimate
from headrace_testing.api_keys import KeyBook
from headrace_testing.charts import RULES, rules
from headrace_testing.checkpoints import save_checkpoint
from headrace_testing.forked import Forge
from headrace_testing.kubernetes import READY_POD, pod
from headrace_testing.model_services import service
from headrace_testing.processes import until
from headrace_testing.prometheus import (
    REDIS_EXPORTER,
    PrometheusServer,
    RedisExporter,
    Target,
    require_program,
)
from headrace_testing.stack import MODEL, EngineProcess, GatewayProcess, Stack

ABSENT = {
    names.ENGINE_SPEC_TOKENS: "the engine does not speculate",
    names.ENGINE_KV_SHARED: "the engine shares no KV",
    names.ENGINE_KV_SHARED_BLOCKS: "the engine shares no KV",
    names.ENGINE_HANDOVER_DURATION: "the engine hands nothing over",
    names.ENGINE_HANDOVER_TOKENS: "the engine hands nothing over",
    names.ENGINE_HANDOVER_KV: "the engine hands nothing over",
    names.QUEUE_LOW_PRIORITY_ADMITTED: "all requests have the usual priority",
    names.BATCH_BEHIND: "there are no batches",
    names.QUEUE_REDELIVERIES: "there is no series before the first redelivery",
    names.GATEWAY_OPEN_REFUSED: "no tenant has too many open requests",
    names.GATEWAY_IMAGES: "the model reads no images",
    names.GATEWAY_PLACEMENT_TOKENS: "one engine is no choice",
    names.ENGINE_TURNS: "the engine shares no accelerator",
    names.ENGINE_TURN_WAIT: "the engine shares no accelerator",
    names.GATEWAY_CANARY_COMPARISONS: "the model has no canary",
    names.GATEWAY_CANARY_FIRST_DIFFERENCE: "the model has no canary",
}
PANELS = [(each, panel) for each in dashboards() for panel in each.panels]
VARIABLES = [variable for each in dashboards() for variable in each.variables]
EXPRESSIONS = {rule.get("alert", rule.get("record")): str(rule["expr"]) for rule in rules()}
# A metric of Headrace or Redis with its label matchers; no functions, labels or keywords.
SELECTOR = re.compile(
    r"\b((?:headrace[_:]|gen_ai_|redis_|target_)[\w:]+)(?=[\s\[{)]|$)(\{[^}]*\})?"
)
LABELS = ("gen_ai_request_model", "gen_ai_token_type")


def title(value: object) -> str | None:
    return getattr(value, "title", None)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    """Prometheus after two rounds of load, so that every rate has a slope."""
    require_program(REDIS_EXPORTER)
    folder = tmp_path_factory.mktemp("monitored")
    checkpoint = save_checkpoint(folder, "llama", max_position_embeddings=1024)
    stack = Stack(checkpoint, folder, start=Forge().start)
    limit_memory(stack.valkey.url)
    exporter = RedisExporter(stack.valkey.url, folder)
    stack.add_engine()
    stack.add_gateway()
    stack.add_gateway("--max-queued-requests", "1")
    book = KeyBook(folder / "keys.yaml")
    book.add("a", tenant="team-a")
    book.add("b", tenant="team-b", limits={"tokens_per_minute": 10})
    stack.add_gateway("--api-keys-file", str(book.path))
    operator = telemetry.setup("headrace-operator", metrics_port=0)
    recorder = Recorder(operator.meter)
    scale(recorder, pods=0)
    server = PrometheusServer(folder, targets(stack, exporter, operator), [RULES])
    try:
        stack.await_engines(1)
        server.await_ready()
        server.await_targets()
        for pods in (1, 2):
            scale(recorder, pods)
            asyncio.run(load(stack, book))
            await_scrapes(server)
        yield server
    finally:
        server.close()
        operator.shutdown()
        exporter.close()
        stack.close()


def limit_memory(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("maxmemory", "1gb")


def scale(recorder: Recorder, pods: int) -> None:
    """Records what a reconciliation does when `pods` engines are ready."""
    served = {"local": {"path": "headrace-demo"}, "servedName": MODEL}
    owner = service(model=served)
    ready = READY_POD[0] | {"lastTransitionTime": "2026-01-01T00:00:40Z"}
    present = [pod(f"engine-{number}", owner.name, conditions=[ready]) for number in range(pods)]
    decision = Decision(
        replicas=pods,
        wanted=pods,
        reason=Reason.BACKLOG,
        message="",
        history=History(),
        estimates=(Estimate(Signal.BACKLOG_REQUESTS, 40.0, 30.0, 2.0),),
    )
    seen = Observations(replicas=pods, ready=pods, updated=pods, desired=pods, decision=decision)
    recorder.record(owner, seen)
    recorder.record_starts(owner, engine_pods.engines(present, WorkloadKind.DEPLOYMENT, 1))
    recorder.reconciled(owner.key, ok=True)


def targets(stack: Stack, exporter: RedisExporter, operator: telemetry.Telemetry) -> list[Target]:
    processes: list[EngineProcess | GatewayProcess] = [*stack.engines, *stack.gateways]
    ports = {process.name: process.metrics_port for process in processes}
    assert operator.server is not None
    ports |= {"redis": exporter.port, "operator": operator.server.port}
    return [Target(port, {"namespace": "demo", "pod": pod}) for pod, port in ports.items()]


async def load(stack: Stack, book: KeyBook) -> None:
    """Sends requests of every kind: whole answers, streams, one constrained by a grammar, a client
    that disconnects, and one that a full queue refuses; with API keys: one that is served, one over
    its limit and one without a key."""
    url, small, guarded = (f"{gateway.url}/v1/completions" for gateway in stack.gateways)
    body = {"model": MODEL, "prompt": list(range(3, 67)), "max_tokens": 24, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=60) as client:
        answers = await asyncio.gather(
            *(client.post(url, json={**body, "stream": number % 2 == 0}) for number in range(8))
        )
        assert {answer.status_code for answer in answers} == {200}
        held = await client.post(url, json={**body, "guided_choice": ["a", "b"]})
        assert held.status_code == 200, held.text
        callers: list[dict[str, str]] = [book.headers("a"), book.headers("b"), {}]
        of_tenants = [await client.post(guarded, json=body, headers=each) for each in callers]
        assert [answer.status_code for answer in of_tenants] == [200, 429, 401]
        long = {**body, "stream": True, "max_tokens": 900}
        async with client.stream("POST", url, json=long) as left:
            await anext(left.aiter_bytes())
        stack.engines[0].signal(signal.SIGSTOP)
        statuses = [
            answer.status_code
            for answer in await asyncio.gather(*(post_and_wake(client, small, stack) for _ in "12"))
        ]
        assert statuses.count(200) == 1, statuses


async def post_and_wake(client: httpx.AsyncClient, url: str, stack: Stack) -> httpx.Response:
    """One of two requests for a queue of one: the refused one comes back and frees the engine."""
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
    answer = await client.post(url, json=body)
    stack.engines[0].signal(signal.SIGCONT)
    return answer


def await_scrapes(server: PrometheusServer) -> None:
    """Waits until all that has happened has been scraped twice."""
    done = server.query("time()")[1]
    oldest = "min(timestamp(up))"
    until(lambda: float(server.query(oldest)[0]["value"][1]) > float(done) + 2, "two more scrapes")


def test_the_gateway_was_used(prometheus: PrometheusServer) -> None:
    """The basis of all other tests: the load is visible in Prometheus."""
    served = prometheus.query("sum by (error_type) (gen_ai_server_request_duration_seconds_count)")

    by_error = {each["metric"].get("error_type"): int(each["value"][1]) for each in served}
    assert by_error == {
        None: 22,
        "client_disconnected": 2,
        "queue_full": 2,
        "rate_limit_exceeded": 2,
    }


@pytest.mark.parametrize(("dashboard", "panel"), PANELS, ids=title)
def test_a_panel_has_data(prometheus: PrometheusServer, dashboard: Dashboard, panel: Panel) -> None:
    for query in panel.queries:
        found = prometheus.query(filled_in(query.expr))
        absent = [metric for metric in ABSENT if metric.prometheus_name in query.expr]

        assert bool(found) != bool(absent), f"{query.expr}: {found or 'no data'}"


@pytest.mark.parametrize(("dashboard", "panel"), PANELS, ids=title)
def test_a_legend_names_existing_labels(
    prometheus: PrometheusServer, dashboard: Dashboard, panel: Panel
) -> None:
    for query in panel.queries:
        wanted = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
        for series in prometheus.query(filled_in(query.expr)):
            assert wanted <= set(series["metric"]), query.expr


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.query)
def test_a_variable_has_values(prometheus: PrometheusServer, variable: Variable) -> None:
    found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable.query)
    assert found is not None
    selector, label = filled_in(found[1]), found[2]

    values = prometheus.api(f"label/{label}/values", **{"match[]": selector})

    absent = any(metric.prometheus_name in selector for metric in ABSENT)
    assert bool(values) != absent


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_rules_use_only_existing_series(prometheus: PrometheusServer, name: str) -> None:
    """An alert is silent when all is well, but each of its series must exist."""
    selectors = [
        metric + matchers
        for metric, matchers in SELECTOR.findall(EXPRESSIONS[name])
        if metric not in LABELS
    ]

    assert selectors
    for selector in selectors:
        absent = any(selector.startswith(metric.prometheus_name) for metric in ABSENT)
        assert bool(prometheus.query(selector)) != absent, selector


def test_prometheus_evaluates_every_rule(prometheus: PrometheusServer) -> None:
    def loaded() -> list[dict[str, Any]]:
        groups = prometheus.api("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    until(lambda: all(rule["health"] != "unknown" for rule in loaded()), "all rules evaluated")

    assert {rule["name"] for rule in loaded()} == set(EXPRESSIONS)
    assert [rule for rule in loaded() if rule["health"] != "ok"] == []


def test_no_alert_fires(prometheus: PrometheusServer) -> None:
    """Alerts about refused requests are pending at most."""
    alerts = prometheus.api("alerts")["alerts"]

    assert [alert for alert in alerts if alert["state"] == "firing"] == []


def filled_in(expression: str) -> str:
    """The query with every variable at "All" and the window that Grafana would choose."""
    text = expression.replace("$__rate_interval", "1m")
    return text.replace("$namespace", ".*").replace("$model", ".*")
