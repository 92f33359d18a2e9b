"""The owner of leased requests: each request has one run, one takeover at a time, and one end."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock, call

import pytest

from headrace_common.errors import BackendUnavailable, FailureCode, RequestFailed
from headrace_common.protocol.base import Beat, EngineQueue, Lease, Verdict
from headrace_common.protocol.ledger import AttemptUsage
from headrace_common.sampling.params import SamplingParams
from headrace_common.structured.structured import StructuredOutputsParams
from headrace_common.wire.images import ImageSpan
from headrace_common.wire.messages import (
    Cancel,
    ChoiceState,
    Disown,
    Failed,
    GenerateRequest,
    Reply,
    Resend,
    Resume,
    Sync,
    Takeover,
    Tokens,
)
from headrace_engine.core.errors import RequestError
from headrace_engine.core.outputs import SequenceOutput
from headrace_engine.core.request import EngineRequest, FinishReason
from headrace_engine.engine.engine_loop import EngineLoop
from headrace_engine.serving.grammar_compilation import GrammarCompilation
from headrace_engine.serving.image_reading import ImageReading
from headrace_engine.serving.leased_request import RequestTimes
from headrace_engine.serving.metrics import EngineMetrics
from headrace_engine.serving.reply_writer import ReplyWriter
from headrace_engine.serving.request_tracker import RequestTracker
from headrace_testing.backends import make_request, make_status
from headrace_testing.waiting import eventually


class Rig:
    """A tracker among stand-ins that record what it tells them."""

    def __init__(self, resume_timeout: float = 30.0) -> None:
        self.queue = AsyncMock(spec=EngineQueue, engine_id="e")
        self.queue.beat.return_value = {}
        self.queue.resume.return_value = True
        self.loop = Mock(spec=EngineLoop)
        self.compilation = Mock(spec=GrammarCompilation)
        self.images = Mock(spec=ImageReading)
        self.images.complete.side_effect = unchanged
        self.writer = Mock(spec=ReplyWriter)
        self.errors: list[BaseException] = []
        self.metrics = Mock(spec=EngineMetrics)
        self.metrics.taken.return_value = RequestTimes(queued_ns=0, taken_ns=0, first_step=0)
        self.tracker = RequestTracker(
            queue=self.queue,
            loop=self.loop,
            compilation=self.compilation,
            images=self.images,
            reply_writer=self.writer,
            metrics=self.metrics,
            status=lambda _: make_status(),
            on_room=lambda: None,
            on_error=self.errors.append,
            resume_timeout=resume_timeout,
            kv_bytes_per_token=1e9,
        )

    @property
    def replies(self) -> list[Reply]:
        return [each.args[1] for each in self.writer.put.mock_calls]

    @property
    def takeovers(self) -> list[str]:
        return [each.request_id for each in self.replies if isinstance(each, Takeover)]

    @property
    def failures(self) -> list[FailureCode]:
        return [each.failure for each in self.replies if isinstance(each, Failed)]

    @property
    def runs(self) -> list[EngineRequest]:
        return [each.args[0] for each in self.loop.add.mock_calls]

    async def begin(self, *leases: Lease) -> None:
        await self.tracker.begin(leases)
        await turns()

    async def answer(self, request_id: str, *token_ids: int, round: int = 1) -> None:
        """Lets a gateway report the tokens that its client has."""
        states = (ChoiceState(token_ids=token_ids),)
        resume = Resume(request_id=request_id, attempt=1, choices=states, round=round)
        self.tracker.handle_control(resume)
        await turns()

    async def cancel(self, request_id: str) -> None:
        self.tracker.handle_control(Cancel(request_id=request_id))
        await turns()


async def turns() -> None:
    """Lets ready tasks run until each of them waits."""
    for _ in range(10):
        await asyncio.sleep(0)


async def unchanged(_: GenerateRequest, request: EngineRequest) -> EngineRequest:
    return request


async def never(_: EngineRequest) -> EngineRequest:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def lease(
    request_id: str,
    *,
    params: SamplingParams | None = None,
    images: tuple[ImageSpan, ...] = (),
    **fields: Any,
) -> Lease:
    request = replace(make_request(request_id=request_id), images=images)
    if params is not None:
        request = replace(request, sampling=params)
    return Lease(**{"request": request, "attempt": 1, "gateway_id": "g", **fields})


def token(run: EngineRequest, index: int, finish_reason: FinishReason | None) -> SequenceOutput:
    return SequenceOutput(run.request_id, 0, index, (5,), finish_reason=finish_reason)


@pytest.fixture
async def rig() -> Rig:
    return Rig()


@pytest.fixture(autouse=True)
def no_task_failed(rig: Rig) -> Iterator[None]:
    yield
    assert rig.errors == []


async def test_the_queue_knows_that_a_request_runs_before_it_runs(rig: Rig) -> None:
    rig.queue.beat.side_effect = lambda *_: rig.loop.add.assert_not_called() or {}

    await rig.begin(lease("a"))

    ((progress,), _) = rig.queue.beat.await_args.args
    assert progress.executing
    assert len(rig.runs) == 1 and rig.tracker.busy.is_set()


async def test_a_run_has_its_tenant_and_its_weight(rig: Rig) -> None:
    request = replace(make_request(request_id="a"), tenant="team", tenant_weight=2.5)

    await rig.begin(lease("a", request=request))

    (run,) = rig.runs
    assert (run.tenant, run.tenant_weight) == ("team", 2.5)


async def test_without_redis_a_request_runs_and_the_next_beat_reports_it(rig: Rig) -> None:
    rig.queue.beat.side_effect = BackendUnavailable("away")

    await rig.begin(lease("a"))

    assert len(rig.runs) == 1


async def test_a_request_ends_with_its_last_token(rig: Rig) -> None:
    await rig.begin(lease("a"))
    (run,) = rig.runs

    counted = [
        rig.tracker.on_output(token(run, 0, None)),
        rig.tracker.on_output(token(run, 1, FinishReason.STOP)),
        rig.tracker.on_output(token(run, 2, None)),
    ]

    assert counted == [1, 1, 0], "what comes after the end is not counted"
    tokens = [each for each in rig.replies if isinstance(each, Tokens)]
    assert [(each.index, each.finish_reason) for each in tokens] == [(0, None), (1, "stop")]
    rig.writer.end.assert_called_once()
    assert not rig.tracker.requests and not rig.tracker.busy.is_set()


async def test_a_recovered_request_continues_after_the_tokens_that_the_client_has(rig: Rig) -> None:
    await rig.begin(lease("a", recovered=True))
    assert rig.takeovers == ["a"] and rig.runs == []

    await rig.answer("a", 7, 8, round=2)
    assert rig.runs == [], "the answer to another question"
    await rig.answer("a", 7, 8)

    (run,) = rig.runs
    assert run.resume == ((7, 8),)


async def test_a_request_whose_state_is_lost_fails() -> None:
    rig = Rig(resume_timeout=0.0)
    rig.queue.gateway_alive.return_value = False
    rig.queue.journal.return_value = None

    await rig.begin(lease("a", recovered=True))

    async def failed() -> bool:
        return rig.failures == [FailureCode.LOST]

    await eventually(failed)


async def test_a_run_starts_again_where_the_gateway_has_other_tokens(rig: Rig) -> None:
    await rig.begin(lease("a"))
    (first,) = rig.runs

    await rig.answer("a", round=0)
    assert rig.takeovers == ["a"]
    assert call(first.request_id) in rig.loop.abort.mock_calls
    await rig.answer("a", 9)

    second = rig.runs[-1]
    assert rig.tracker.on_output(token(first, 0, None)) == 0, "the first run's output comes late"
    assert rig.tracker.on_output(token(second, 1, None)) == 1


async def test_a_request_that_is_leased_again_asks_its_gateway(rig: Rig) -> None:
    await rig.begin(lease("a"))

    await rig.begin(lease("a", attempt=2))

    assert rig.takeovers == ["a"] and len(rig.tracker.requests) == 1
    assert call(rig.runs[0].request_id) in rig.loop.abort.mock_calls


async def test_a_request_whose_attempt_was_here_before_asks_its_gateway(rig: Rig) -> None:
    """Redis forgot that the engine gave it back. A later attempt is begun as the queue says."""
    for attempt, takeovers in ((1, []), (1, ["a"]), (2, ["a"])):
        await rig.begin(lease("a", attempt=attempt))
        assert rig.takeovers == takeovers
        await rig.tracker.give_back(list(rig.tracker.requests))


async def test_rounds_of_all_requests_are_counted_together(rig: Rig) -> None:
    await rig.begin(lease("a", recovered=True), lease("b", recovered=True))
    assert [leased.round for leased in rig.tracker.requests] == [1, 2]


async def test_tokens_are_not_sent_again_while_a_takeover_waits(rig: Rig) -> None:
    """They may differ from the tokens that the client has."""
    await rig.begin(lease("a"))
    rig.tracker.on_output(token(rig.runs[0], 0, None))
    await rig.answer("a", round=0)
    written = list(rig.replies)
    rig.tracker.handle_control(Resend(request_id="a", choice=0, index=0))
    assert rig.replies == written


async def test_a_takeover_ends_with_its_request(rig: Rig) -> None:
    await rig.begin(lease("a", recovered=True))
    (leased,) = rig.tracker.requests

    rig.tracker.handle_control(Disown(request_id="a", attempt=1, superseded=True))
    await turns()

    assert not rig.tracker.requests and not leased.tasks
    rig.queue.resume.assert_not_awaited()
    rig.writer.end.assert_not_called()
    rig.metrics.ended.assert_not_called()


async def test_a_request_that_ends_while_its_grammar_compiles_never_runs(rig: Rig) -> None:
    rig.compilation.complete.side_effect = never
    params = SamplingParams(seed=1, structured_outputs=StructuredOutputsParams(regex="a"))
    await rig.begin(lease("a", params=params))
    (leased,) = rig.tracker.requests
    assert leased.tasks

    await rig.cancel("a")

    assert rig.failures == [FailureCode.CANCELLED]
    assert rig.runs == [] and not leased.tasks


IMAGES = (ImageSpan(digest=b"d" * 32, start=0, length=2, grid=(1, 2, 4)),)


async def test_a_request_runs_when_its_images_have_been_read(rig: Rig) -> None:
    read = asyncio.Event()

    async def when_read(_: GenerateRequest, request: EngineRequest) -> EngineRequest:
        await read.wait()
        return request

    rig.images.complete.side_effect = when_read
    await rig.begin(lease("a", images=IMAGES), lease("b"))
    assert [run.request_id[0] for run in rig.runs] == ["b"]
    read.set()
    await turns()
    assert [run.request_id[0] for run in rig.runs] == ["b", "a"]


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (RequestError("it is broken"), FailureCode.INVALID),
        (RequestFailed(FailureCode.LOST, "an image is lost"), FailureCode.LOST),
    ],
)
async def test_a_request_whose_images_cannot_be_read_fails(
    rig: Rig, error: Exception, failure: FailureCode
) -> None:
    rig.images.complete.side_effect = error
    await rig.begin(lease("a", images=IMAGES))
    assert rig.failures == [failure]
    assert rig.runs == []


async def test_an_answer_of_other_weights_is_left_to_its_side(rig: Rig) -> None:
    await rig.begin(lease("a", recovered=True, foreign=True))
    await rig.answer("a", 5, 6)

    rig.queue.give_back.assert_awaited_once_with(["a"], for_own_side=True)
    rig.queue.resume.assert_not_awaited()
    assert rig.runs == []
    assert len(rig.tracker.requests) == 0


async def test_an_answer_whose_side_is_gone_for_good_fails(rig: Rig) -> None:
    await rig.begin(lease("a", recovered=True, foreign=True, abandoned=True))
    await rig.answer("a", 5, 6)

    assert rig.failures == [FailureCode.LOST]
    assert rig.runs == []


async def test_an_answer_of_other_weights_that_has_not_begun_starts_here(rig: Rig) -> None:
    await rig.begin(lease("a", recovered=True, foreign=True))
    await rig.answer("a")

    assert [run.request_id[0] for run in rig.runs] == ["a"]
    rig.queue.give_back.assert_not_awaited()


async def test_a_suspect_waits_until_it_is_alone(rig: Rig) -> None:
    await rig.begin(lease("a"), lease("suspect", recovered=True, suspect=True))
    assert rig.tracker.has_suspect and rig.takeovers == []

    await rig.cancel("a")

    assert rig.takeovers == ["suspect"]


async def test_suspects_run_one_after_the_other(rig: Rig) -> None:
    await rig.begin(*(lease(each, recovered=True, suspect=True) for each in ("a", "b", "c")))
    assert rig.takeovers == ["a"]
    await rig.answer("a")

    await rig.cancel("b")
    assert rig.takeovers == ["a"], "a runs already"
    await rig.cancel("a")

    assert rig.takeovers == ["a", "c"]


@pytest.mark.parametrize(
    ("verdict", "failures"),
    [
        (Verdict.STOLEN, []),
        (Verdict.CANCELLED, [FailureCode.CANCELLED]),
        (Verdict.EXPIRED, [FailureCode.DEADLINE]),
    ],
)
async def test_a_beats_verdict_ends_a_request(
    rig: Rig, verdict: Verdict, failures: list[FailureCode]
) -> None:
    await rig.begin(lease("a"))
    rig.queue.beat.return_value = {"a": Beat(verdict=verdict)}

    await rig.tracker.beat(list(rig.tracker.requests))

    assert rig.failures == failures and not rig.tracker.requests
    assert rig.writer.end.call_count == len(failures)


async def test_a_request_that_redis_lost_continues(rig: Rig) -> None:
    await rig.begin(lease("a"))
    rig.queue.beat.return_value = {"a": Beat(verdict=Verdict.MISSING)}

    await rig.tracker.beat(list(rig.tracker.requests))

    assert len(rig.tracker.requests) == 1


async def test_a_request_that_no_gateway_knows_fails(rig: Rig) -> None:
    await rig.begin(lease("a"))
    rig.queue.beat.return_value = {"a": Beat(verdict=Verdict.OWNED, gateway_id="g")}

    rig.tracker.handle_control(Disown(request_id="a", attempt=1, superseded=False))
    await turns()

    assert rig.failures == [FailureCode.ABANDONED]


async def test_a_disowned_request_continues_with_the_gateway_that_a_beat_names(rig: Rig) -> None:
    await rig.begin(lease("a"))
    rig.queue.beat.return_value = {"a": Beat(verdict=Verdict.OWNED, gateway_id="other")}

    rig.tracker.handle_control(Disown(request_id="a", attempt=1, superseded=False))
    await turns()

    assert rig.failures == []
    gateway_id, reply = rig.writer.put.call_args.args
    assert gateway_id == "other" and isinstance(reply, Sync)


async def test_requests_are_given_back_after_their_replies_are_written(rig: Rig) -> None:
    await rig.begin(lease("a"), lease("b"))
    rig.writer.flush = AsyncMock(side_effect=rig.queue.give_back.assert_not_awaited)

    await rig.tracker.give_back(list(rig.tracker.requests))

    rig.writer.flush.assert_awaited_once()
    rig.queue.give_back.assert_awaited_once_with(["a", "b"], handed_over=False)
    assert not rig.tracker.requests and rig.loop.abort.call_count == 2


async def test_an_end_is_stored_with_what_the_attempt_used(rig: Rig) -> None:
    await rig.begin(lease("a"))
    (run,) = rig.runs
    rig.tracker.on_output(token(run, 0, None)._replace(cached_tokens=2))

    started = rig.tracker.by_engine_key[run.request_id].read_usage()
    rig.tracker.on_output(token(run, 1, FinishReason.STOP))

    _, _, outcome, usage = rig.writer.end.mock_calls[0].args
    assert outcome.cached_tokens == usage.cached_tokens == 2
    assert usage.engine_ms >= started.engine_ms and usage.kv_byte_seconds > 0


async def test_a_request_that_was_never_run_has_used_nothing(rig: Rig) -> None:
    await rig.begin(lease("a", recovered=True))
    await rig.cancel("a")

    _, _, _, usage = rig.writer.end.mock_calls[0].args
    assert usage == AttemptUsage()
