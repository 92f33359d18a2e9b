"""With sealing, Redis contains no plain text of clients or of the model."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from headrace_common.config.process import EXIT_CONFIG
from headrace_common.protocol.frames import encode_frame
from headrace_common.sealing.keyring import Keyring, new_key, read_keyring, write_keyring
from headrace_common.wire.messages import Frame
from headrace_testing.greedy import GreedyCase
from headrace_testing.processes import Starter, until
from headrace_testing.redis_dump import forms
from headrace_testing.sealed_suite import sealed, wanted
from headrace_testing.sealed_texts import ROW, append_only_files, found_in
from headrace_testing.sealed_watch import Findings, Watch, memory_of, servers
from headrace_testing.stack import MODEL, Stack

TOKENS = 64

pytestmark = pytest.mark.skipif(wanted(), reason="some of them use their own keys, some none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sealed")


@pytest.fixture(scope="module")
def keyring(folder: Path) -> Path:
    path = folder / "keyring"
    path.write_text(write_keyring([new_key()]))
    return path


@pytest.fixture(scope="module")
def flags(keyring: Path) -> tuple[str, str]:
    return "--sealing-keys-file", str(keyring)


@pytest.fixture(scope="module")
def sealing(
    checkpoint: Path, folder: Path, flags: tuple[str, str], start: Starter
) -> Iterator[Stack]:
    stack = Stack(checkpoint, folder, start=start)
    try:
        stack.add_engine(*flags)
        stack.add_gateway(*flags)
        stack.await_engines(1)
        yield stack
    finally:
        stack.close()


def completion(case: GreedyCase, **fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL, "prompt": list(case.prompt), "max_tokens": TOKENS, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, **fields,
    }  # fmt: skip


def ask(stack: Stack, path: str, body: Any, **headers: str) -> httpx.Response:
    url = f"{stack.gateways[0].url}{path}"
    return httpx.post(url, json=body, headers=headers, timeout=120)


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def traces(case: GreedyCase) -> list[bytes]:
    """The forms in which parts of a prompt or its answer could be stored."""
    middle = case.output[TOKENS // 2 : TOKENS]
    return [*forms(case.prompt, 8), *forms(case.output, 8), *forms(middle, 8)]


def server_of(stack: Stack) -> int:
    """The pid of the stack's queue server."""
    (found,) = servers(os.getpid(), stack.valkey.folder)
    return found.pid


def everything(folder: Path, pids: list[int]) -> bytes:
    files = [path.read_bytes() for path in append_only_files(folder)]
    return b"".join([*files, *map(memory_of, pids)])


def long_cases(cases: list[GreedyCase]) -> list[GreedyCase]:
    return [case for case in cases if len(case.prompt) > 20]


def test_no_part_of_prompts_and_answers_is_in_memory_or_in_the_append_only_file(
    sealing: Stack, folder: Path, cases: list[GreedyCase]
) -> None:
    chosen = long_cases(cases)[:6]
    for number, case in enumerate(chosen):
        headers = {"Idempotency-Key": f"k{number}"} if number % 2 else {}
        answer = ask(sealing, "/v1/completions", completion(case), **headers)
        assert tuple(tokens(answer)) == case.output[:TOKENS]
    lines = [
        json.dumps({
            "custom_id": f"c{number}", "method": "POST", "url": "/v1/completions",
            "body": completion(case, user="a name that nobody has"),
        })
        for number, case in enumerate(chosen)
    ]  # fmt: skip
    url = sealing.gateways[0].url
    file = httpx.post(
        f"{url}/v1/files",
        data={"purpose": "batch"},
        files={"file": ("secret plans.jsonl", "\n".join(lines).encode())},
        timeout=60,
    ).json()
    body = {
        "input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h",
        "metadata": {"project": "of which nobody knows"},
    }  # fmt: skip
    batch = ask(sealing, "/v1/batches", body).json()

    def ended() -> bool:
        found = httpx.get(f"{url}/v1/batches/{batch['id']}", timeout=60).json()
        assert found["status"] != "failed", found
        return bool(found["status"] == "completed")

    until(ended, "the batch to be completed")
    found = httpx.get(f"{url}/v1/batches/{batch['id']}", timeout=60).json()
    results = httpx.get(f"{url}/v1/files/{found['output_file_id']}/content", timeout=60).text
    assert results.count("custom_id") == len(chosen)

    server = server_of(sealing)
    until(lambda: bool(append_only_files(folder)), "the append-only file")
    everywhere = everything(folder, [server])
    words = [b"secret plans", b"name that nobody has", b"of which nobody knows", b"custom_id"]
    assert found_in(everywhere, [trace for case in chosen for trace in traces(case)]) == []
    assert found_in(everywhere, words) == []
    assert file["id"].encode() in everywhere  # so this is the memory of the right server


def test_the_search_finds_unsealed_data(
    checkpoint: Path, cases: list[GreedyCase], tmp_path: Path, start: Starter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for process in ("GATEWAY", "ENGINE"):
        monkeypatch.delenv(f"HEADRACE_{process}_SEALING_KEYS_FILE", raising=False)
    stack = Stack(checkpoint, tmp_path, start=start)
    try:
        stack.add_engine()
        stack.add_gateway()
        stack.await_engines(1)
        case = long_cases(cases)[0]
        tokens(ask(stack, "/v1/completions", completion(case)))
        server = server_of(stack)
        memory = memory_of(server)
        until(lambda: bool(append_only_files(tmp_path)), "the append-only file")
        until(
            lambda: bool(found_in(everything(tmp_path, []), forms(case.output, 8))),
            "the answer in the append-only file",
        )
        assert found_in(everything(tmp_path, []), forms(case.prompt, 8)) != []
        assert found_in(memory, traces(case)) != []
    finally:
        stack.close()


def test_a_suites_check_searches_all_data_that_the_suite_wrote(
    checkpoint: Path, cases: list[GreedyCase], tmp_path: Path, start: Starter
) -> None:
    findings = Findings()
    with sealed(tmp_path, findings):
        stack = Stack(checkpoint, tmp_path, start=start)
        try:
            stack.add_engine()
            stack.add_gateway()
            stack.await_engines(1)
            for case in long_cases(cases)[:3]:
                tokens(ask(stack, "/v1/completions", completion(case, stream=False)))
            size = sum(path.stat().st_size for path in append_only_files(tmp_path))
            until(lambda: size > 0, "the append-only file")
        finally:
            stack.close()

    assert findings.problems == []
    assert findings.opened > 10 and findings.needles > 20 and findings.files >= 1


def test_the_check_reports_the_text_it_found_and_its_place(
    checkpoint: Path, cases: list[GreedyCase], tmp_path: Path, start: Starter,
    keyring: Path, flags: tuple[str, str],
) -> None:  # fmt: skip
    watch = Watch(tmp_path, read_keyring(keyring.read_bytes()))
    stack = Stack(checkpoint, tmp_path, start=start)
    try:
        stack.add_engine(*flags)
        stack.add_gateway(*flags)
        stack.await_engines(1)
        case = long_cases(cases)[0]
        tokens(ask(stack, "/v1/completions", completion(case)))
        with redis.Redis.from_url(stack.redis_url) as client:
            client.set("a note", str(list(case.prompt[:ROW])))
            client.xadd("o:{g.a}", {"f": encode_frame(Frame("e", ()))})
            watch.search_memory(os.getpid())
            watch.search_memory(os.getpid())
    finally:
        stack.close()
    watch.search_files()

    in_memory, in_file, plain = watch.findings.problems
    assert "in the memory of" in in_memory and "prompt of" in in_memory
    assert f"in {tmp_path}" in in_file and "prompt of" in in_file and "a note" in in_file
    assert plain == "not sealed: frame ('a',)"


def test_keys_can_be_changed_while_processes_run(
    sealing: Stack, keyring: Path, cases: list[GreedyCase]
) -> None:
    """A key is added, then used, then the old one is removed. Each client gets the right tokens."""
    processes = [*sealing.engines, *sealing.gateways]
    old, new = read_keyring(keyring.read_bytes()).first, new_key()
    for number, keys in enumerate(([old, new], [new, old], [new]), 1):
        keyring.write_text(write_keyring(keys))
        for process in processes:
            until(lambda p=process, n=number: read_again(p) == n, "the keys to be read")  # type: ignore[misc]
        case = long_cases(cases)[number]
        answer = ask(sealing, "/v1/completions", completion(case))
        assert tuple(tokens(answer)) == case.output[:TOKENS]


def read_again(process: Any) -> int:
    entries = process.log_entries()
    return sum(entry.get("message") == "sealing keys read again" for entry in entries)


@pytest.mark.parametrize("given", ["other keys", "no keys"])
def test_a_process_without_the_keys_does_not_start(
    sealing: Stack, folder: Path, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for process in ("GATEWAY", "ENGINE"):
        monkeypatch.delenv(f"HEADRACE_{process}_SEALING_KEYS_FILE", raising=False)
    flags: tuple[str, ...] = ()
    if given == "other keys":
        path = folder / "other"
        path.write_text(write_keyring(Keyring([new_key()]).keys))
        flags = ("--sealing-keys-file", str(path))
    gateway, engine = sealing.add_gateway(*flags), sealing.add_engine(*flags)
    sealing.gateways.remove(gateway)
    sealing.engines.remove(engine)

    for refused in (gateway, engine):
        assert refused.wait() == EXIT_CONFIG
        text = refused.log.read_text()
        message = "is not in sealing_keys_file" if flags else "set sealing_keys_file"
        assert message in text and '"code": "backend_unfit"' in text
