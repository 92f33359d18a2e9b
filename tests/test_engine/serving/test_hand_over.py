"""A producer's decisions: which requests it hands over, when, and which it keeps."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.base import EngineQueue, EngineStatus, Lease, TakeBounds
from headrace_common.protocol.kv_roles import KVRole
from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.errors import ConfigError
from headrace_engine.engine.engine import Engine
from headrace_engine.engine.engine_loop import EngineLoop
from headrace_engine.serving.hand_over import HandOver
from headrace_engine.serving.leased_request import LeasedRequest, RequestTimes
from headrace_engine.serving.metrics import EngineMetrics
from headrace_engine.serving.request_tracker import RequestTracker
from headrace_engine.serving.role_config import RoleConfig
from headrace_testing.backends import make_request, make_status

SIZE = 4


def status(name: str, role: KVRole, running: int = 0, **fields: Any) -> EngineStatus:
    known = replace(make_status(engine_id=name), kv_role=role.value, max_local_prefill_length=8)
    return replace(known, running=running, capacity=4, **fields)


class Rig:
    """A HandOver among stand-ins. `written` has what waits for KV in the shared tier."""

    def __init__(self, role: KVRole = KVRole.PRODUCER, *, shares_kv: bool = True) -> None:
        self.queue = AsyncMock(spec=EngineQueue)
        self.queue.limit = Mock()
        self.queue.engines.return_value = [status("c", KVRole.CONSUMER)]
        self.written: list[Callable[[], None]] = []
        engine = Mock(spec=Engine, shares_kv=shares_kv)
        engine.call_when_shared.side_effect = self.written.append
        loop = Mock(spec=EngineLoop)
        loop.between_steps.side_effect = lambda action: action()
        self.running: dict[str, LeasedRequest] = {}
        self.tracker = Mock(spec=RequestTracker, by_engine_key=self.running)
        self.tracker.give_back = AsyncMock(side_effect=self._forget)
        self.metrics = Mock(spec=EngineMetrics)
        self.errors: list[BaseException] = []
        self.hand_over = HandOver(
            RoleConfig(role=role, max_local_prefill_length=8, timeout=3.0),
            queue=self.queue,
            engine=engine,
            loop=loop,
            tracker=self.tracker,
            metrics=self.metrics,
            status=lambda: status("me", role),
            block_size=SIZE,
            kv_bytes_per_token=10.0,
            on_error=self.errors.append,
        )

    async def _forget(self, requests: list[LeasedRequest], *, handed_over: bool) -> None:
        assert handed_over
        for leased in requests:
            del self.running[leased.engine_key]

    def run(self, name: str, *, tokens: int = 1, **fields: Any) -> LeasedRequest:
        """A running request with a prompt of 10 tokens that has made `tokens` here."""
        request = make_request(request_id=name)
        request = replace(request, prompt_token_ids=tuple(range(1, 11)), **fields)
        times = RequestTimes(queued_ns=0, taken_ns=0, first_step=1)
        leased = LeasedRequest(Lease(request=request, attempt=1, gateway_id="g"), times)
        leased.choices[0].token_ids += [5] * tokens
        times.first_token_ns = 1 if tokens else None
        self.running[leased.engine_key] = leased
        return leased

    async def write(self) -> None:
        """The shared tier has written everything."""
        waiting = self.written[:]
        self.written.clear()
        for action in waiting:
            action()
        for _ in range(5):
            await asyncio.sleep(0)

    @property
    def given(self) -> list[str]:
        return [
            leased.request_id
            for call in self.tracker.give_back.await_args_list
            for leased in call.args[0]
        ]


@pytest.fixture
async def rig() -> Rig:
    return Rig()


async def test_a_request_goes_once_its_kv_is_in_the_shared_tier(rig: Rig) -> None:
    rig.run("a", tokens=4)
    rig.run("still computing", tokens=0)
    await rig.hand_over.look()
    assert rig.given == [] and len(rig.written) == 1

    rig.hand_over.move()  # after the next step
    assert len(rig.written) == 1, "it is on its way already"
    await rig.write()

    assert rig.given == ["a"]
    (tokens, kv_bytes, _), _ = rig.metrics.handed_over.call_args
    assert (tokens, kv_bytes) == (12, 120.0)
    assert rig.errors == []


async def test_no_more_go_than_consumers_have_room_for(rig: Rig) -> None:
    rig.queue.engines.return_value = [
        status("c", KVRole.CONSUMER, running=3),
        status("d", KVRole.CONSUMER, draining=True),
        status("p", KVRole.PRODUCER),
    ]
    for name in "abc":
        rig.run(name)
    await rig.hand_over.look()
    await rig.write()
    assert rig.given == ["a"]

    rig.queue.engines.return_value = [status("b", KVRole.BOTH, running=2)]
    await rig.hand_over.look()
    await rig.write()
    assert rig.given == ["a", "b", "c"]


async def test_without_other_engines_a_producer_keeps_everything(rig: Rig) -> None:
    rig.queue.engines.return_value = [status("p", KVRole.PRODUCER)]
    rig.run("a")

    await rig.hand_over.look()

    assert rig.written == []
    rig.queue.limit.assert_called_with(TakeBounds())


async def test_engines_of_the_other_side_of_a_canary_do_not_count(rig: Rig) -> None:
    rig.queue.engines.return_value = [status("c", KVRole.CONSUMER, variant="canary")]
    rig.run("a")

    await rig.hand_over.look()

    assert rig.written == []
    rig.queue.limit.assert_called_with(TakeBounds())


async def test_a_request_that_ended_meanwhile_is_not_given_back(rig: Rig) -> None:
    rig.run("a")
    await rig.hand_over.look()
    rig.running.clear()

    await rig.write()

    assert rig.given == []


@pytest.mark.parametrize(
    "fields", [{"lora": "sql"}, {"sampling": SamplingParams(n=5, max_tokens=8, seed=1)}]
)
async def test_what_cannot_go_stays(rig: Rig, fields: dict[str, Any]) -> None:
    """The tier has no KV of adapters, and no consumer has room for five choices."""
    rig.run("a", **fields)

    await rig.hand_over.look()

    assert rig.written == []


async def test_a_consumer_hands_nothing_over_and_leaves_long_prompts() -> None:
    rig = Rig(KVRole.CONSUMER)
    rig.queue.engines.return_value = [status("p", KVRole.PRODUCER)]
    rig.run("a")

    await rig.hand_over.look()

    assert rig.written == []
    rig.queue.limit.assert_called_with(TakeBounds(most=8, hold=3.0))


async def test_roles_stay_while_redis_is_unreachable(rig: Rig) -> None:
    rig.queue.engines.side_effect = BackendUnavailable("away")

    await rig.hand_over.look()

    rig.queue.limit.assert_not_called()


async def test_a_drain_waits_for_requests_that_are_being_given_back(rig: Rig) -> None:
    release = asyncio.Event()

    async def slow(*_: object, handed_over: bool) -> None:
        await release.wait()

    rig.tracker.give_back.side_effect = slow
    rig.run("a")
    await rig.hand_over.look()
    await rig.write()
    finishing = asyncio.create_task(rig.hand_over.finish())
    await asyncio.sleep(0)
    assert not finishing.done()

    release.set()

    await finishing
    rig.metrics.handed_over.assert_called_once()


async def test_an_engine_without_a_shared_tier_has_no_role() -> None:
    with pytest.raises(ConfigError, match="kv_role kv_producer needs"):
        Rig(shares_kv=False)
