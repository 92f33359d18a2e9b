"""Two models take turns on one accelerator, and an engine sleeps by HTTP: no answer is lost or
changed.

Real engines, gateway and Valkey.
"""

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace_testing.greedy import GreedyCase
from headrace_testing.processes import Starter, until
from headrace_testing.stack import EngineProcess, GatewayProcess
from headrace_testing.streams import Crowd
from headrace_testing.valkey import ValkeyServer

MODELS = ("first", "second")
REQUESTS = 100  # of each model
SHARING = (
    *("--sharing-group", "gpu", "--sharing-sleep-level", "2", "--sharing-min-awake", "0.3"),
    *("--sharing-max-awake", "1", "--sharing-timeout", "0.2", "--log-format", "json"),
    *("--max-num-seqs", "32", "--lease", "60"),
)


@pytest.fixture(scope="module")
def checkpoints(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from headrace_testing.checkpoints import save_checkpoint

    other = save_checkpoint(tmp_path_factory.mktemp("other"), "qwen3")
    return {MODELS[0]: checkpoint, MODELS[1]: other}


@pytest.fixture(scope="module")
def undisturbed(checkpoints: dict[str, Path]) -> dict[str, list[GreedyCase]]:
    from headrace_testing.greedy import clear_cases

    return {name: clear_cases(folder, 20, 120) for name, folder in checkpoints.items()}


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def engines(
    valkey: ValkeyServer,
    checkpoints: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    start: Starter,
) -> Iterator[dict[str, EngineProcess]]:
    logs = tmp_path_factory.mktemp("engines")
    running = {
        name: EngineProcess(folder, valkey.url, logs / name, *SHARING, model=name, start=start)
        for name, folder in checkpoints.items()
    }
    try:
        for engine in running.values():
            engine.await_log("engine ready")
        yield running
    finally:
        for engine in running.values():
            engine.kill()


@pytest.fixture(scope="module")
def gateway(
    valkey: ValkeyServer,
    engines: dict[str, EngineProcess],
    tmp_path_factory: pytest.TempPathFactory,
    start: Starter,
) -> Iterator[GatewayProcess]:
    log = tmp_path_factory.mktemp("gateway") / "log"
    with GatewayProcess(None, valkey.url, log, start=start) as process:
        until(lambda: process.ready, "the gateway to be ready")
        until(lambda: set(MODELS) <= set(listed(process)), "both models to be listed")
        yield process


def listed(gateway: GatewayProcess) -> list[str]:
    with urllib.request.urlopen(f"{gateway.url}/v1/models", timeout=30) as answer:
        return [model["id"] for model in json.load(answer)["data"]]


class Timed(Crowd):
    """A crowd that notes how long each request took, in seconds."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.seconds: list[float] = []

    async def _stream(self, client: Any, number: int) -> None:
        begun = time.monotonic()
        await super()._stream(client, number)
        self.seconds.append(time.monotonic() - begun)


async def ask_both(url: str, cases: dict[str, list[GreedyCase]]) -> dict[str, Timed]:
    wanted = {name: (own * REQUESTS)[:REQUESTS] for name, own in cases.items()}
    crowds = {name: Timed([url], own, name) for name, own in wanted.items()}
    async with asyncio.timeout(300):
        await asyncio.gather(*(crowd.run() for crowd in crowds.values()))
    return crowds


def report(text: str) -> None:
    """Writes a figure that `pytest -s` shows."""
    print(text)  # noqa: T201


def wake_ups(engines: dict[str, EngineProcess]) -> int:
    entries = [entry for engine in engines.values() for entry in engine.log_entries()]
    return sum(entry.get("message") == "engine awake" for entry in entries)


def given_back(engines: dict[str, EngineProcess]) -> int:
    entries = [entry for engine in engines.values() for entry in engine.log_entries()]
    return sum(int(str(entry.get("given_back", 0))) for entry in entries)


def resident(engine: EngineProcess) -> int:
    return round(int(psutil.Process(engine.pid).memory_info().rss) / 2**20)


def awake(engine: EngineProcess) -> bool:
    return engine.metric("vllm:engine_sleep_state", 'sleep_state="awake"') == 1


def test_two_models_take_turns_and_no_answer_is_lost_or_changed(
    engines: dict[str, EngineProcess],
    gateway: GatewayProcess,
    undisturbed: dict[str, list[GreedyCase]],
) -> None:
    before = wake_ups(engines)
    crowds = asyncio.run(ask_both(gateway.url, undisturbed))
    for name, crowd in crowds.items():
        assert crowd.mistakes() == []
        report(f"{name}: {len(crowd.seconds)} right, the longest after {max(crowd.seconds):.1f} s")
    report(f"{wake_ups(engines) - before} wake-ups, {given_back(engines)} requests given back")
    assert wake_ups(engines) - before >= 2
    assert sum(awake(engine) for engine in engines.values()) <= 1
    report(str({name: f"{resident(engine)} MiB" for name, engine in engines.items()}))


def test_an_idle_engine_gives_way_to_a_request_of_the_other_model(
    engines: dict[str, EngineProcess],
    gateway: GatewayProcess,
    undisturbed: dict[str, list[GreedyCase]],
) -> None:
    for name in (*MODELS, *MODELS):
        crowd = Crowd([gateway.url], undisturbed[name][:1], name)
        asyncio.run(crowd.run())
        assert crowd.mistakes() == []
        other = next(each for each in MODELS if each != name)
        assert awake(engines[name]) and not awake(engines[other])


def post(engine: EngineProcess, path: str) -> dict[str, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{engine.metrics_port}{path}", method="POST")
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def test_an_engine_sleeps_and_wakes_by_http(
    valkey: ValkeyServer,
    gateway: GatewayProcess,
    checkpoint: Path,
    undisturbed: dict[str, list[GreedyCase]],
    tmp_path: Path,
    start: Starter,
) -> None:
    name, cases = "alone", undisturbed[MODELS[0]]
    flags = ("--enable-sleep-mode", "--log-format", "json")
    log = tmp_path / name
    with EngineProcess(checkpoint, valkey.url, log, *flags, model=name, start=start) as engine:
        engine.await_log("engine ready")
        until(lambda: name in listed(gateway), "the model to be listed")
        for level in (1, 2):
            crowd = Crowd([gateway.url], cases, name)
            asyncio.run(crowd.run())
            assert crowd.mistakes() == []
            before = resident(engine)
            assert post(engine, f"/sleep?level={level}") == {"is_sleeping": True, "level": level}
            asleep = resident(engine)
            assert post(engine, "/wake_up") == {"is_sleeping": False, "level": 0}
            again = Crowd([gateway.url], cases, name)
            asyncio.run(again.run())
            assert again.mistakes() == []
            report(f"level {level}: {before} MiB, {asleep} asleep, {resident(engine)} after it")
