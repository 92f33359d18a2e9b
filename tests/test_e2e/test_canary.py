"""Real engines of two revisions of a model: which of them answers, and who continues an answer."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_common.protocol.base import CanaryPlan
from headrace_common.protocol.ledger import UsageEntry
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.ledger import LedgerReader
from headrace_common.protocol.redis.variants import RedisCanary
from headrace_common.protocol.variants import Agreement, drawn
from headrace_common.wire.keys import ShardKeys
from headrace_testing.checkpoints import save_checkpoint
from headrace_testing.processes import Starter, until
from headrace_testing.stack import MODEL, EngineProcess, Stack

PROMPT = [3, 4, 5]
LONG = 500  # tokens, so that an answer lasts until its engine is killed
PERCENT = 40
# Long enough that no side counts as gone because the machine is busy.
LEASE = ("--lease", "5")


class Rollout:
    """A stable engine, and canaries with other weights. The gateway knows the stable model."""

    def __init__(self, stack: Stack, revision: Path, folder: Path, start: Starter) -> None:
        self.stack = stack
        self.url = stack.gateways[0].url
        self._revision, self._folder, self._start = revision, folder, start

    def add_canary(self) -> EngineProcess:
        log = self._folder / f"canary-{len(self.stack.engines)}.log"
        flags = ("--variant", "canary", "--no-register-model", *LEASE)
        engine = EngineProcess(self._revision, self.stack.redis_url, log, *flags, start=self._start)
        self.stack.engines.append(engine)
        engine.await_log("engine ready")
        return engine

    def give_all_to_canary(self) -> EngineProcess:
        """Adds a canary for all requests, and waits until every process knows of it.

        Until then the stable engine takes the canary's requests, too.
        """
        _, old = self.answer()
        canary = self.add_canary()
        until(lambda: self._has_beat("canary"), "the canary to tell that it is there")
        self.set_percent(100)
        until(lambda: self._has_beat("stable"), "the stable engine to know of the canary")
        until(lambda: self.answer()[1] != old, "an answer of the canary")
        return canary

    def set_percent(self, percent: float | None) -> None:
        self.set_plan(None if percent is None else CanaryPlan(percent))

    def set_plan(self, plan: CanaryPlan | None) -> None:
        self._run(lambda connection: RedisCanary(connection).set_plan(MODEL, plan))

    def agreement(self) -> Agreement:
        found: Agreement = self._run(lambda connection: RedisCanary(connection).agreement(MODEL))
        return found

    def entered(self) -> list[UsageEntry]:
        """The ledger."""

        async def read(connection: Connection) -> list[UsageEntry]:
            return [entry async for entry in LedgerReader(connection, {MODEL: 1}).entries()]

        found: list[UsageEntry] = self._run(read)
        return found

    def _has_beat(self, side: str) -> bool:
        command = ("HEXISTS", ShardKeys(MODEL).canary, f"beat.{side}")
        return bool(self._run(lambda connection: connection.client.command(*command)))

    def _run(self, use: Callable[[Connection], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            connection = Connection(ConnectionConfig(url=self.stack.redis_url))
            try:
                return await use(connection)
            finally:
                await connection.close()

        return asyncio.run(run())

    def answer(self, max_tokens: int = 16) -> tuple[str, str]:
        """A request's id and the text of its answer."""
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0}
        reply = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)
        assert reply.status_code == 200, reply.text
        return reply.headers["x-request-id"], reply.json()["choices"][0]["text"]

    def answers_like(self, text: str) -> Callable[[], bool]:
        return lambda: self.answer()[1] == text

    def stream(self, begun: Callable[[], None]) -> tuple[str, dict[str, object] | None]:
        """Streams a long answer; calls `begun` in its middle. Returns its text and its error."""
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": LONG, "temperature": 0}
        text, error, chunks = "", None, 0
        with httpx.stream(
            "POST", f"{self.url}/v1/completions", json={**body, "stream": True}, timeout=120
        ) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    error = event["error"]
                    continue
                text += event["choices"][0]["text"]
                chunks += 1
                if chunks == 3:
                    begun()
        return text, error


@pytest.fixture
def rollout(checkpoint: Path, tmp_path: Path, start: Starter) -> Iterator[Rollout]:
    revision = save_checkpoint(tmp_path / "new", "llama", seed=1, max_position_embeddings=1024)
    stack = Stack(checkpoint, tmp_path, start=start)
    try:
        stack.add_engine(*LEASE)
        stack.add_gateway()
        stack.await_engines(1)
        yield Rollout(stack, revision, tmp_path, start)
    finally:
        stack.close()


def test_a_canary_gets_its_share_of_requests_and_continues_its_own_answers(
    rollout: Rollout,
) -> None:
    _, old = rollout.answer()
    canary = rollout.give_all_to_canary()
    _, new = rollout.answer()

    def strays(answers: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """The answers of another side than their ids draw."""
        return [
            (rid, text) for rid, text in answers if text != (new if drawn(rid, PERCENT) else old)
        ]

    # The gateway learns the share within seconds; until then the canary answers all.
    rollout.set_percent(PERCENT)
    until(rollout.answers_like(old), "an answer of the stable engine")
    answers = [rollout.answer() for _ in range(40)]
    assert not strays(answers)
    assert {text for _, text in answers} == {old, new}

    def gets_all() -> bool:
        rid, text = rollout.answer()
        return text == new and not drawn(rid, PERCENT)

    rollout.set_percent(100)
    until(gets_all, "an answer of the canary that a smaller share leaves to the stable engine")
    _, whole = rollout.answer(LONG)
    assert whole.startswith(new)
    next_one = rollout.add_canary()

    def kill_both() -> None:
        for engine in (canary, next_one):
            rollout.stack.retire(engine)
        rollout.add_canary()

    assert rollout.stream(kill_both) == (whole, None), "no token is of the stable weights"
    rollout.stack.engines[-1].kill()
    until(rollout.answers_like(old), "the stable engine to answer in the canary's place")


def test_greedy_answers_are_compared_and_nobody_pays_for_it(rollout: Rollout) -> None:
    rollout.answer()
    rollout.add_canary()
    rollout.set_plan(CanaryPlan(0, comparisons_per_minute=60))
    ids = set[str]()

    def compared() -> bool:
        ids.add(rollout.answer()[0])
        return rollout.agreement().compared >= 2

    until(compared, "two answers to be compared")
    assert rollout.agreement().equal == 0, "the canary's weights are others"
    counted = 'result="different"'
    assert rollout.stack.gateways[0].metric("headrace_gateway_canary_comparisons_total", counted)
    entered = rollout.entered()
    assert {entry.tenant for entry in entered} == {"default"}
    assert ids <= {entry.request_id for entry in entered}


def test_an_answer_of_a_revision_that_is_gone_fails_instead_of_changing_weights(
    rollout: Rollout,
) -> None:
    _, old = rollout.answer()
    canary = rollout.give_all_to_canary()
    _, whole = rollout.answer(LONG)
    assert not whole.startswith(old)

    def remove() -> None:
        rollout.set_percent(None)
        rollout.stack.retire(canary)

    text, error = rollout.stream(remove)

    assert whole.startswith(text)
    assert text != whole
    assert error is not None
    assert error["code"] == "state_lost"
