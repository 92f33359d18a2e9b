"""The script of `helm test`, run as in its pod: against the real gateway application."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from headrace_gateway.http.app import AppDependencies, create_app
from headrace_gateway.models.models import Models
from headrace_gateway.settings import GatewaySettings
from headrace_testing.charts import named, render
from headrace_testing.gateway import MODEL, Gateway, gateway_checkpoint, running, serve
from headrace_testing.helm_test import SCRIPT, helm_test
from headrace_testing.valkey import free_port


@pytest_asyncio.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with serve(gateway_checkpoint(tmp_path)) as running:
        yield running


async def test_a_release_with_engines_answers(gateway: Gateway) -> None:
    status, output = await helm_test(gateway.url)

    assert status == 0, output
    assert f"gateway lists {MODEL}" in output
    assert f"{MODEL} answered with" in output


async def test_a_release_without_engines_passes_with_a_note(gateway: Gateway) -> None:
    gateway.engine.statuses = []
    gateway.forget_engines()

    status, output = await helm_test(gateway.url)

    assert status == 0, output
    assert f"no engine serves {MODEL}" in output
    assert "answered" not in output


async def test_each_model_with_a_ready_engine_is_asked(tmp_path: Path) -> None:
    folder = gateway_checkpoint(tmp_path)
    async with serve(folder, extra_models={"asleep": str(folder)}) as gateway:
        status, output = await helm_test(gateway.url)

    assert status == 0, output
    assert f"{MODEL} answered with" in output
    assert "asleep is not asked: " in output


async def test_a_release_without_a_model_passes_with_a_note(gateway: Gateway) -> None:
    settings = GatewaySettings(port=0, drain_timeout=0)
    deps = AppDependencies(served=Models({}), client=gateway.engine, queue=gateway.engine)
    async with running(create_app(settings, deps), settings) as (_, port):
        status, output = await helm_test(f"http://127.0.0.1:{port}")

    assert status == 0, output
    assert "gateway lists no model yet: apply a ModelService" in output


async def test_a_release_without_a_gateway_fails() -> None:
    status, output = await helm_test(f"http://127.0.0.1:{free_port()}")

    assert status == 1
    assert output.startswith("failed: ")


async def test_an_operator_that_does_not_answer_fails_the_test(gateway: Gateway) -> None:
    operator = f"http://127.0.0.1:{free_port()}/health/live"

    status, output = await helm_test(gateway.url, HEADRACE_OPERATOR_URL=operator)

    assert status == 1
    assert "failed: " in output


def test_the_pod_runs_this_script() -> None:
    config = named(render(), "ConfigMap", "headrace-test")

    assert config["data"]["helm_test.py"].strip() == SCRIPT.read_text().strip()
