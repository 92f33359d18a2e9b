"""API keys of real gateway processes over a real Valkey: start, change and end of a file."""

from pathlib import Path

import httpx
import pytest

from headrace_testing.api_keys import KeyBook, MountedSecret
from headrace_testing.forked import Forge
from headrace_testing.gateway import MODEL
from headrace_testing.processes import HeadraceProcess, until
from headrace_testing.valkey import ValkeyServer

EXIT_CONFIG = 78


def start(checkpoint: Path, valkey: ValkeyServer, keys: Path, log: Path) -> HeadraceProcess:
    arguments = ["--model", str(checkpoint), "--served-model-name", MODEL, "--port", "0"]
    more = ["--redis-url", valkey.url, "--log-format", "json"]
    env = {"HEADRACE_GATEWAY_API_KEYS_FILE": str(keys)}
    return HeadraceProcess("headrace_gateway", [*arguments, *more], log, env, Forge().start)


def test_two_gateways_follow_a_mounted_secret(
    checkpoint: Path, valkey: ValkeyServer, tmp_path: Path
) -> None:
    """A new key works, a revoked one does not, a broken file changes nothing; no restart."""
    book, mounted = KeyBook(tmp_path / "keys.yaml"), MountedSecret(tmp_path / "mount")
    book.add("old")
    book.add("one", limits={"requests_per_minute": 1})
    mounted.update(list(book.keys.values()))
    with (
        start(checkpoint, valkey, mounted.path, tmp_path / "g1.log") as one,
        start(checkpoint, valkey, mounted.path, tmp_path / "g2.log") as two,
    ):
        urls = [str(each.await_log("gateway ready")["address"]) for each in (one, two)]

        def statuses(key: str) -> list[int]:
            headers = book.headers(key)
            return [
                httpx.get(f"{u}/v1/models", headers=headers, timeout=30).status_code for u in urls
            ]

        assert statuses("old") == [200, 200]
        book.add("new")
        assert statuses("new") == [401, 401]
        mounted.update([key for key in book.keys.values() if key.id != "old"])
        until(lambda: statuses("new") == [200, 200], "both gateways to know the new key")
        until(lambda: statuses("old") == [401, 401], "both gateways to refuse the old key")

        answers = [
            httpx.post(
                f"{url}/v1/completions",
                json={"prompt": "Hi"},
                headers={**book.headers("one"), "x-request-timeout": "0.2"},
                timeout=30,
            )
            for url in urls
        ]
        assert [answer.status_code for answer in answers] == [504, 429]
        mounted.path.resolve().write_text("keys: {")
        for gateway in (one, two):
            gateway.await_log("api keys cannot be read, the known ones stay")
        assert statuses("new") == [200, 200]

    for log in (tmp_path / "g1.log", tmp_path / "g2.log"):
        assert not any(secret in log.read_text() for secret in book.secrets.values())


@pytest.mark.parametrize("content", [None, "keys: [{id: a, hash: nonsense}]"])
def test_a_gateway_does_not_start_without_its_keys(
    checkpoint: Path, valkey: ValkeyServer, tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "keys.yaml"
    if content is not None:
        file.write_text(content)
    with start(checkpoint, valkey, file, tmp_path / "log") as process:
        assert process.wait() == EXIT_CONFIG

    (line,) = [e for e in process.log_entries() if e["message"] == "gateway cannot serve"]
    assert str(line["error"]).startswith(f"api_keys_file: {file}: ")
    assert "nonsense" not in str(line["error"])
