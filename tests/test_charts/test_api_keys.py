"""API keys in the chart: how the Secret reaches gateways, and `helm test` with keys on."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from helm_python.errors import HelmError

from headrace_common.config.api_keys import SECRET_FIELD, secret_manifest
from headrace_gateway.limits.api_keys import KeyFile
from headrace_testing.api_keys import KeyBook
from headrace_testing.charts import Workload, render, render_files, workload
from headrace_testing.gateway import MODEL, Gateway, gateway_checkpoint, serve
from headrace_testing.helm_test import helm_test

KEYS_ON = {"gateway": {"apiKeys": {"enabled": True, "existingSecret": "api-keys"}}}


def gateway_of(values: dict[str, Any] | None = None) -> Workload:
    return workload(render(values), "headrace-gateway")


def test_the_secret_is_mounted_whole_and_read_only() -> None:
    """The Secret is mounted as a folder: the kubelet never updates a file mounted by subPath."""
    gateway = gateway_of(KEYS_ON)
    (mount,) = [m for m in gateway.containers[0]["volumeMounts"] if m["name"] == "api-keys"]
    (volume,) = [v for v in gateway.spec["volumes"] if v["name"] == "api-keys"]

    assert mount == {"name": "api-keys", "mountPath": "/etc/headrace/api-keys", "readOnly": True}
    assert volume["secret"] == {"secretName": "api-keys"}


def test_gateways_read_the_field_that_the_command_writes() -> None:
    file = gateway_of(KEYS_ON).environment["HEADRACE_GATEWAY_API_KEYS_FILE"]["value"]
    secret = yaml.safe_load(secret_manifest("api-keys", []))

    assert file == f"/etc/headrace/api-keys/{SECRET_FIELD}"
    assert list(secret["stringData"]) == [SECRET_FIELD]


def test_without_keys_no_object_mentions_them() -> None:
    gateway = gateway_of()
    texts = [text for path, text in render_files().items() if path.startswith("templates/gateway")]

    assert "HEADRACE_GATEWAY_API_KEYS_FILE" not in gateway.environment
    assert not any("api-keys" in text for text in texts)


@pytest.mark.parametrize(
    ("keys", "remedy"),
    [
        ({"enabled": True}, "headrace keys create ID --secret NAME"),
        ({"existingSecret": "api-keys"}, "set gateway.apiKeys.enabled=true"),
    ],
)
def test_an_incomplete_setting_is_refused_with_its_remedy(
    keys: dict[str, object], remedy: str
) -> None:
    with pytest.raises(HelmError, match=remedy):
        render({"gateway": {"apiKeys": keys}})


def test_the_notes_say_whether_api_keys_are_required() -> None:
    with_keys = render_files(KEYS_ON)["templates/NOTES.txt"]
    without = render_files()["templates/NOTES.txt"]

    assert '/v1/models -H "Authorization: Bearer $KEY"' in with_keys
    assert "with a key of the Secret api-keys in $KEY:" in with_keys
    assert "Every client that reaches the API may use it" in without
    assert "3. List its models:\n" in without and "Bearer" not in without


def test_helm_test_gets_its_key_from_a_secret() -> None:
    keys = {"enabled": True, "existingSecret": "api-keys", "testKeySecret": "test-key"}
    pod = workload(render({"gateway": {"apiKeys": keys}}), "headrace-test-api")

    assert pod.environment["HEADRACE_API_KEY"]["valueFrom"] == {
        "secretKeyRef": {"name": "test-key", "key": "key"}
    }
    assert "HEADRACE_API_KEY" not in workload(render(), "headrace-test-api").environment


@pytest.fixture
def book(tmp_path: Path) -> KeyBook:
    book = KeyBook(tmp_path / "keys.yaml")
    book.add("tester")
    return book


@pytest_asyncio.fixture
async def gateway(tmp_path: Path, book: KeyBook) -> AsyncIterator[Gateway]:
    keys = KeyFile(book.path)
    async with serve(gateway_checkpoint(tmp_path / "model"), keys=keys) as running:
        yield running


async def test_a_release_with_keys_answers_with_one(gateway: Gateway, book: KeyBook) -> None:
    status, output = await helm_test(gateway.url, HEADRACE_API_KEY=book.secrets["tester"])

    assert status == 0, output
    assert f"{MODEL} answered with" in output
    assert book.secrets["tester"] not in output


async def test_without_a_key_only_health_is_tested_and_the_output_says_so(gateway: Gateway) -> None:
    status, output = await helm_test(gateway.url)

    assert status == 0, output
    assert "models are not asked: the API needs a key" in output


async def test_a_key_that_is_refused_fails_the_test(gateway: Gateway) -> None:
    status, output = await helm_test(gateway.url, HEADRACE_API_KEY="hr-revoked")

    assert status == 1
    assert "401" in output
