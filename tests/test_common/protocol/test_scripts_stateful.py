"""The Lua scripts against their model in memory: random interleavings of two gateways and three
engines give the same answers, and the streams hold exactly what is alive."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from headrace_common.errors import FailureCode, QueueFull
from headrace_common.protocol.base import (
    AdmitResult,
    Candidate,
    Outcome,
    Placement,
    Progress,
    QueueLimits,
    TakeBounds,
)
from headrace_common.protocol.failures import failed
from headrace_common.protocol.ledger import AttemptUsage
from headrace_common.wire.messages import ChoiceState, GenerateRequest, adapter_key
from headrace_testing.backends import MODEL, InMemory, OverRedis, make_request, make_status
from headrace_testing.valkey import ValkeyServer

T = TypeVar("T")
LIMITS = QueueLimits(max_requests=9, max_tokens=60, max_tenant_requests=5)
PRIORITIES = (0, 0, -1, 0, 0, 1, 0)
ENGINES = ("e0", "e1", "e2")
engines = st.sampled_from(ENGINES)
# The only engine that has the adapter of some of the requests.
WITH_ADAPTER, VERSION = "e0", "1" * 32
# The seconds by which gateways' clocks are ahead of the store's clock.
AHEAD = {"g0": -90_000, "g1": 90_000}
gateways = st.sampled_from(tuple(AHEAD))
# Long holds, so that no request is stolen because a test is slow.
HOLD_MS = 3_600_000
BOUNDS = (
    TakeBounds(),
    TakeBounds(fewest=5, handed_over=False, hold=HOLD_MS / 1000),
    TakeBounds(most=4, hold=HOLD_MS / 1000),
)
MANNERS: Sequence[Mapping[str, bool]] = ({}, {}, {"polite": True}, {"disputed": True})
REQUESTS = 12
OVER = 11  # the request whose deadline has passed
requests = st.integers(0, REQUESTS - 1)
usages = st.builds(AttemptUsage, *(st.integers(0, 9) for _ in range(3)))


class ScriptsAndModel(RuleBasedStateMachine):
    """Does everything in Redis and in memory, and compares the results."""

    server: ValkeyServer

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.redis = OverRedis(self.server.url)
        self.model = InMemory()
        self.run(self.redis.wipe())
        both = (self.redis, self.model)
        self.gateways = {
            name: [b.gateway(name, ahead=ahead) for b in both] for name, ahead in AHEAD.items()
        }
        self.engines = {name: [b.engine(name) for b in both] for name in ENGINES}
        for queue in self.engines[WITH_ADAPTER]:
            queue.serve_adapters([adapter_key("sql", VERSION)])
        self.requests: list[GenerateRequest] = []
        self.attempts: dict[str, int] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def same(self, real: T, model: T) -> T:
        assert real == model
        return real

    def teardown(self) -> None:
        self.run(self.redis.close())
        self.runner.close()

    @initialize()
    def make_requests(self) -> None:
        self.requests = [
            replace(
                make_request(
                    request_id=f"0.r{number}",
                    priority=PRIORITIES[number % len(PRIORITIES)],
                    prompt=(1,) * (number % 8 + 1),
                    max_tokens=2,
                    seconds=-1 if number == OVER else 600,
                ),
                tenant=f"t{number % 3}",
                tenant_weight=(1.0, 3.0, 0.5)[number % 3],
                lora=None if number % 4 else "sql",
                lora_version=None if number % 4 else VERSION,
            )
            for number in range(REQUESTS)
        ]

    @rule(gateway=gateways, number=requests, again=st.booleans(), manner=st.sampled_from(MANNERS))
    def admit(self, gateway: str, number: int, again: bool, manner: Mapping[str, bool]) -> None:
        request = self.requests[number]
        seen = self.attempts.get(request.request_id, 0) if again else None
        real, model = (
            self.run(self.admitted(queue, request, seen, None, **manner))
            for queue in self.gateways[gateway]
        )
        self.same(real, model)

    @rule(gateway=gateways, numbers=st.lists(requests, min_size=4, max_size=9))
    def admit_many(self, gateway: str, numbers: list[int]) -> None:
        for number in numbers:
            for queue in self.gateways[gateway]:
                self.run(self.admitted(queue, self.requests[number], None))

    @rule(
        gateway=gateways,
        numbers=st.lists(requests, min_size=1, max_size=9),
        order=st.permutations(ENGINES),
        load_factor=st.sampled_from((1.0, 1.25, 9.0)),
    )
    def admit_placed(
        self, gateway: str, numbers: list[int], order: list[str], load_factor: float
    ) -> None:
        candidates = tuple(Candidate(engine_id=name, capacity=2 + len(name)) for name in order[:2])
        placement = Placement(
            candidates=candidates, capacity=9, load_factor=load_factor, hold_ms=HOLD_MS
        )
        for number in numbers:
            for queue in self.gateways[gateway]:
                self.run(self.admitted(queue, self.requests[number], None, placement))

    async def admitted(
        self,
        queue: Any,
        request: GenerateRequest,
        seen: int | None,
        placement: Placement | None = None,
        **manner: bool,
    ) -> AdmitResult | str:
        deadline_ms = request.deadline_ms + 1000 * AHEAD[queue.gateway_id]
        try:
            admission: AdmitResult = await queue.admit(
                replace(request, deadline_ms=deadline_ms),
                LIMITS,
                seen=seen,
                placement=placement,
                **manner,
            )
        except QueueFull as error:
            return str(error)
        return admission

    @rule(
        engine=engines,
        count=st.integers(1, 4),
        room=st.none() | st.integers(0, 12),
        low=st.none() | st.integers(0, 2),
    )
    def take(self, engine: str, count: int, room: int | None, low: int | None) -> None:
        real, model = (self.run(q.take(count, room, low)) for q in self.engines[engine])
        for lease in self.same(real, model):
            assert 0 < lease.left <= 600
            self.attempts[lease.request.request_id] = lease.attempt

    @rule(engine=engines, count=st.integers(1, 3), suspects=st.booleans())
    def reap(self, engine: str, count: int, suspects: bool) -> None:
        real, model = (self.run(q.reap(count, suspects=suspects)) for q in self.engines[engine])
        # Redis returns several requests in the order of the stream, the model in the order of
        # admission.
        assert len(real) == len(model)
        if {lease.request.request_id for lease in real} == {
            lease.request.request_id for lease in model
        }:
            for lease in real:
                assert lease in model
                self.attempts[lease.request.request_id] = lease.attempt

    @rule(
        engine=engines,
        number=requests,
        made=st.integers(0, 3),
        executing=st.booleans(),
        usage=usages,
    )
    def beat(
        self, engine: str, number: int, made: int, executing: bool, usage: AttemptUsage
    ) -> None:
        rid = self.requests[number].request_id
        item = Progress(
            request_id=rid,
            attempt=self.attempts.get(rid, 0),
            journaled=(0,),
            choices=(ChoiceState(token_ids=tuple(range(made))),),
            executing=executing,
            usage=usage,
        )
        real, model = (self.run(q.beat([item], make_status(engine))) for q in self.engines[engine])
        self.same(dict(real), dict(model))

    @rule(engine=engines, number=requests, made=st.integers(0, 3))
    def resume(self, engine: str, number: int, made: int) -> None:
        rid = self.requests[number].request_id
        states = [ChoiceState(token_ids=tuple(range(made)))]
        attempt = self.attempts.get(rid, 0)
        self.same(*(self.run(q.resume(rid, attempt, states)) for q in self.engines[engine]))

    @rule(engine=engines, number=requests)
    def read_journal(self, engine: str, number: int) -> None:
        rid = self.requests[number].request_id
        self.same(*(self.run(q.journal(rid)) for q in self.engines[engine]))

    @rule(engine=engines, number=requests, made=st.integers(0, 3), usage=usages)
    def finish(self, engine: str, number: int, made: int, usage: AttemptUsage) -> None:
        rid = self.requests[number].request_id
        state = ChoiceState(token_ids=tuple(range(made)), finish_reason="length")
        attempt = self.attempts.get(rid, 0)
        self.same(
            *(
                self.run(q.finish(rid, attempt, Outcome(choices=(state,)), usage))
                for q in self.engines[engine]
            )
        )

    @rule(
        numbers=st.lists(requests, min_size=1, max_size=6),
        why=st.sampled_from((None, FailureCode.LOST, FailureCode.LOST, FailureCode.ABANDONED)),
        gateway=gateways,
        then=st.sampled_from((*MANNERS, None)),
    )
    def end_and_continue(
        self,
        numbers: list[int],
        why: FailureCode | None,
        gateway: str,
        then: Mapping[str, bool] | None,
    ) -> None:
        """Engines end requests; then these are cancelled, or a gateway queues them again."""
        for number in numbers:
            rid = self.requests[number].request_id
            attempt = self.attempts.get(rid, 0)
            outcome = Outcome(failed=failed(rid, attempt, why) if why else None)
            for engine in ENGINES:
                self.same(
                    *(self.run(q.finish(rid, attempt, outcome)) for q in self.engines[engine])
                )
            if then is None:
                self.cancel(gateway, number, None)
                then = {}
            self.admit(gateway, number, True, then)

    @rule(gateway=gateways, number=requests)
    def deliver_outcome(self, gateway: str, number: int) -> None:
        rid = self.requests[number].request_id
        self.same(*(self.run(q.deliver_outcome(rid, MODEL)) for q in self.gateways[gateway]))

    @rule(engine=engines, number=requests, handed_over=st.booleans())
    def give_back(self, engine: str, number: int, handed_over: bool) -> None:
        for queue in self.engines[engine]:
            rid = self.requests[number].request_id
            self.run(queue.give_back([rid], handed_over=handed_over))

    @rule(engine=engines, bounds=st.sampled_from(BOUNDS))
    def limit(self, engine: str, bounds: TakeBounds) -> None:
        for queue in self.engines[engine]:
            queue.limit(bounds)

    @rule(gateway=gateways, engine=engines, number=requests)
    def release(self, gateway: str, engine: str, number: int) -> None:
        rid = self.requests[number].request_id
        for queue in self.gateways[gateway]:
            self.run(queue.release(rid, MODEL, engine, self.attempts.get(rid, 0)))

    @rule(gateway=gateways, number=requests, given=st.none() | st.integers(0, 4))
    def cancel(self, gateway: str, number: int, given: int | None) -> None:
        for queue in self.gateways[gateway]:
            self.run(queue.cancel(self.requests[number].request_id, MODEL, given))

    @rule(gateway=gateways, number=requests, given=st.integers(0, 4))
    def note_given(self, gateway: str, number: int, given: int) -> None:
        for queue in self.gateways[gateway]:
            self.run(queue.note_given(self.requests[number].request_id, MODEL, given))

    @invariant()
    def each_request_is_entered_once(self) -> None:
        """All further entries correct the first one."""
        real, model = (
            sorted(
                (replace(entry, accepted_ms=0, ended_ms=0) for entry in self.run(each.ledger())),
                key=lambda entry: (entry.request_id, entry.part),
            )
            for each in (self.redis, self.model)
        )
        for entry in self.same(real, model):
            assert entry.part or min(entry.prompt_tokens, entry.output_tokens) >= 0

    @invariant()
    def the_streams_hold_what_is_alive(self) -> None:
        real, model = (self.run(q.depth(MODEL)) for q in self.gateways["g0"])
        assert (real.waiting, real.pending, real.waiting_tokens) == (
            model.waiting,
            model.pending,
            model.waiting_tokens,
        )


def test_the_scripts_behave_like_their_model(valkey_server: ValkeyServer) -> None:
    class Machine(ScriptsAndModel):
        server = valkey_server

    run_state_machine_as_test(
        Machine, settings=settings(max_examples=25, stateful_step_count=40, deadline=None)
    )


@pytest.mark.parametrize("name", ["admit", "take", "reap", "beat", "finish"])
def test_every_script_describes_its_arguments(name: str) -> None:
    from importlib.resources import files

    text = (files("headrace_common.protocol.redis") / "lua" / f"{name}.lua").read_text()
    assert all(f"-- {word}" in text for word in ("KEYS", "ARGV", "Result"))
