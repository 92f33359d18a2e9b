"""The alert rules: they are valid, pass promtool's tests, and each alert has a page."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from headrace_common.observability.metric_names import ALL_METRICS, MetricKind
from headrace_common.wire.keys import GROUP, PRIORITIES, ShardKeys
from headrace_dashboards import promql
from headrace_testing.charts import RULES, of_kind, render, rules
from headrace_testing.prometheus import PROMTOOL, require_program
from headrace_testing.valkey import ValkeyServer

ROOT = Path(__file__).resolve().parents[2]
UNIT_TESTS = sorted((Path(__file__).parent / "alerts").glob("*.yaml"))
PAGE = ROOT / "docs" / "operations.md"
RUNBOOK = "docs/operations.md#"
OTHERS = {
    *("redis_up", promql.REDIS_MEMORY_USED, promql.REDIS_MEMORY_MAX, "target_info"),
    *("kube_statefulset_replicas", "kube_statefulset_status_replicas_ready"),
}


ALERTS = {str(rule["alert"]): rule for rule in rules() if "alert" in rule}


def promtool(*arguments: str) -> None:
    done = subprocess.run(
        [require_program(PROMTOOL), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_accepts_the_rules() -> None:
    promtool("check", "rules", str(RULES))


@pytest.mark.parametrize("file", UNIT_TESTS, ids=lambda path: path.stem)
def test_alerts_fire_when_they_should(file: Path) -> None:
    promtool("test", "rules", str(file))


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_fires_in_a_unit_test(name: str) -> None:
    text = " ".join(file.read_text() for file in UNIT_TESTS)

    assert re.search(rf'ALERTS\{{alertname="{name}",alertstate="firing",[^}}]+\}}\'\n', text)


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_to_do(name: str) -> None:
    alert = ALERTS[name]

    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    assert alert["labels"]["severity"] in ("warning", "critical")
    assert alert["annotations"]["runbook_url"] == RUNBOOK + name.lower()
    assert re.search(rf"^#+ {name}$", PAGE.read_text(), re.MULTILINE)


def test_the_page_has_only_existing_alerts() -> None:
    described = re.findall(r"^#+ (Headrace[A-Z]\w+)$", PAGE.read_text(), re.MULTILINE)

    assert sorted(described) == sorted(ALERTS)


def test_rules_use_only_exported_metrics() -> None:
    suffixes = {MetricKind.HISTOGRAM: ("_bucket", "_sum", "_count")}
    known = OTHERS | {str(rule["record"]) for rule in rules() if "record" in rule}
    for metric in ALL_METRICS:
        known |= {metric.prometheus_name + end for end in suffixes.get(metric.kind, ("",))}
    text = " ".join(str(rule["expr"]) for rule in rules())
    queried = set(re.findall(r"\b(?:headrace|gen_ai_server|redis|target|kube)[_:][\w:]+", text))

    assert queried
    assert queried <= known


def test_alerts_and_dashboards_agree_on_which_errors_clients_cause() -> None:
    (failures,) = [
        rule for rule in rules() if rule.get("record") == "headrace:request_failures:rate5m"
    ]

    assert f'error_type!~"{promql.CLIENT_FAULTS}"' in failures["expr"]


def test_the_page_lists_the_errors_that_clients_cause() -> None:
    (listed,) = re.findall(r"because of the client do not count\s+\(([^)]*)\)", PAGE.read_text())

    assert set(re.findall(r"`(\w+)`", listed)) == set(promql.CLIENT_FAULTS.split("|"))


def test_the_stateful_set_of_the_bundled_redis_is_found_by_its_name() -> None:
    (pattern,) = set(re.findall(r'statefulset=~"(.*?)"', RULES.read_text()))
    (found,) = of_kind(render(), "StatefulSet")

    assert re.fullmatch(pattern, found["metadata"]["name"])


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    """A server with an empty queue for a model `m`."""
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    server.start()
    with redis.Redis.from_url(server.url) as client:
        for priority in PRIORITIES:
            client.xgroup_create(ShardKeys("m").queue(priority), GROUP, mkstream=True)
        client.response_callbacks.clear()
        yield client
    server.stop()


def redis_commands() -> list[str]:
    found = re.findall(r"(?:^    |[`;] ?)rc ([A-Z][^#`;\n]*)", PAGE.read_text(), re.MULTILINE)
    return sorted({command.strip() for command in found})


@pytest.mark.parametrize("command", redis_commands())
def test_a_documented_redis_command_works(queue: redis.Redis, command: str) -> None:
    queue.execute_command(*shlex.split(command))  # type: ignore[no-untyped-call]


def test_documented_keys_are_those_of_the_protocol() -> None:
    shard = ShardKeys("m")
    known = {shard.stats, shard.engines, shard.dead_letters, shard.tenants, *shard.queues}

    named = set(re.findall(r"'(\w+:\{m\.0\}(?::\w+)?)'", PAGE.read_text()))

    assert named
    assert named <= known | {shard.record("REQUEST_ID")}
