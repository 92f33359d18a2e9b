"""A gateway without configured models serves models that engines register.

Real processes and a real Valkey.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from openai import NotFoundError, OpenAI

from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.registry import RedisModelRegistry
from headrace_testing.processes import Starter, until
from headrace_testing.stack import MODEL, EngineProcess, GatewayProcess
from headrace_testing.valkey import ValkeyServer

EngineMaker = Callable[..., EngineProcess]
OWNER = "models/tiny"
TEMPLATE = "{% for m in messages %}hello {{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def gateway(
    valkey: ValkeyServer, tmp_path_factory: pytest.TempPathFactory, start: Starter
) -> Iterator[GatewayProcess]:
    log = tmp_path_factory.mktemp("gateway") / "log"
    with GatewayProcess(None, valkey.url, log, "--log-format", "json", start=start) as process:
        process.await_log("gateway ready")
        yield process


@pytest.fixture
def engine_of(checkpoint: Path, valkey: ValkeyServer, start: Starter) -> EngineMaker:
    """Starts an engine of the model, by the path of its log and its flags."""
    return lambda log, *flags: EngineProcess(checkpoint, valkey.url, log, *flags, start=start)


def remove(valkey: ValkeyServer, owner: str) -> bool:
    async def ask() -> bool:
        connection = Connection(ConnectionConfig(url=valkey.url))
        try:
            return await RedisModelRegistry(connection).remove(MODEL, owner)
        finally:
            await connection.close()

    return asyncio.run(ask())


def prompt_tokens(gateway: GatewayProcess, text: str) -> int:
    body = {"prompt": text, "add_special_tokens": False}
    return int(httpx.post(f"{gateway.url}/tokenize", json=body, timeout=30).json()["count"])


def waiting(gateway: GatewayProcess) -> float:
    """The number of requests that wait for the model, from the metric that the autoscaler reads."""
    text = httpx.get(f"http://127.0.0.1:{gateway.metrics_port}/metrics", timeout=30).text
    found = re.search(rf'^headrace_queue_depth\{{[^}}]*"{MODEL}"[^}}]*\}} (\S+)$', text, re.M)
    return float(found[1]) if found else 0.0


def test_a_registered_model_is_served_without_configuration(
    engine_of: EngineMaker, valkey: ValkeyServer, gateway: GatewayProcess, tmp_path: Path
) -> None:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0, timeout=120) as client:
        assert list(client.models.list()) == []
        with pytest.raises(NotFoundError, match="none is registered yet"):
            client.completions.create(model=MODEL, prompt="x")

        template = tmp_path / "template"
        template.write_text(TEMPLATE)
        flags = ("--owner", OWNER, "--chat-template", str(template), "--max-model-len", "300")
        with engine_of(tmp_path / "engine", *flags) as engine:
            engine.await_log("engine ready")
            answer = client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "x"}],
                max_tokens=4,
                temperature=0,
            )
            assert answer.usage is not None and answer.usage.completion_tokens == 4
            assert answer.usage.prompt_tokens == prompt_tokens(gateway, "hello x")

        (model,) = client.models.list()
        assert (model.id, model.model_extra and model.model_extra["max_model_len"]) == (MODEL, 300)
        with httpx.Client(base_url=gateway.url, timeout=120) as http:
            body = {"model": MODEL, "prompt": "x", "max_tokens": 4}
            with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as queued:
                assert queued.status_code == 200
                until(lambda: waiting(gateway) == 1, "the request to wait for an engine")

                assert not remove(valkey, "someone/else")
                assert remove(valkey, OWNER)
                stream = "".join(queued.iter_text())
        error = json.loads(stream.rsplit("data: ", 1)[1])["error"]
        assert error["code"] == "model_removed"
        until(lambda: waiting(gateway) == 0, "the request to have left the queue")
        until(lambda: list(client.models.list()) == [], "the model to be gone")
        with pytest.raises(NotFoundError):
            client.completions.create(model=MODEL, prompt="x")
        assert gateway.alive


def test_requests_for_a_removed_model_wait_if_its_owner_holds_them(
    engine_of: EngineMaker, valkey: ValkeyServer, gateway: GatewayProcess, tmp_path: Path
) -> None:
    flags = ("--owner", OWNER, "--hold-waiting")
    with engine_of(tmp_path / "engine", *flags) as engine:
        engine.await_log("engine ready")
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0, timeout=120) as client:
        until(lambda: len(list(client.models.list())) == 1, "the model to be known")

        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.completions.create, model=MODEL, prompt="x", max_tokens=4)
            until(lambda: waiting(gateway) == 1, "the request to wait for an engine")
            assert remove(valkey, OWNER)
            until(lambda: list(client.models.list()) == [], "the model to be gone")
            assert waiting(gateway) == 1, "alerts see what waits"
            with engine_of(tmp_path / "again", *flags) as engine:
                assert len(answer.result(120).choices) == 1
        assert remove(valkey, OWNER)
        until(lambda: list(client.models.list()) == [], "the model to be gone")
