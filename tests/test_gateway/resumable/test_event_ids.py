"""Resuming a stream after any of its events gives exactly the remaining events, on any gateway."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_common.protocol.store import StoredRequest
from headrace_common.sampling.params import SamplingParams
from headrace_common.text.tokenizer import Tokenizer
from headrace_common.wire.messages import GenerateRequest, Logprobs
from headrace_gateway.errors import ApiError
from headrace_gateway.models.loading import load_static
from headrace_gateway.models.models import ServedModel
from headrace_gateway.parsing.output import PLAIN, OutputForm
from headrace_gateway.queue_client.client import Delta
from headrace_gateway.queue_client.run import Accepted, Run, Usage
from headrace_gateway.resumable.event_ids import START, Position, ResumableEvents, parse_event_id
from headrace_gateway.resumable.sessions import sampling_of, single_tokens
from headrace_gateway.resumable.stored_requests import answer_of
from headrace_gateway.settings import GatewaySettings
from headrace_testing.tokenizers import byte_level_tokenizer, metaspace_tokenizer, write_checkpoint

REQUEST_ID = "0123456789abcdef" * 2


@dataclass(frozen=True)
class Case:
    """The texts of the choices of one prompt, and the request's options."""

    texts: tuple[str, ...]
    stop: tuple[str, ...] = ()
    operation: str = "text_completion"
    logprobs: int | None = None
    include_usage: bool = True
    eos: bool = True
    form: OutputForm = PLAIN


@pytest.fixture(scope="module", params=["byte_level", "metaspace"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    backend = byte_level_tokenizer() if request.param == "byte_level" else metaspace_tokenizer()
    eos = "<|im_end|>" if request.param == "byte_level" else "</s>"
    folder = write_checkpoint(tmp_path_factory.mktemp("tokenizer"), backend, eos_token=eos)
    chosen = GatewaySettings(model=str(folder), served_model_name="tiny")
    return load_static(chosen)["tiny"]


def stored(case: Case) -> StoredRequest:
    sampling = SamplingParams(n=len(case.texts), seed=1, logprobs=case.logprobs)
    request = GenerateRequest(
        request_id="0.x",
        model="tiny",
        prompt_token_ids=(5, 6),
        sampling=sampling,
        created_ms=1,
        deadline_ms=2,
    )
    return StoredRequest(
        request_id=REQUEST_ID,
        operation=case.operation,
        fingerprint=b"",
        created=1,
        expires_ms=3,
        requests=(request,),
        stop=case.stop,
        include_usage=case.include_usage,
        return_token_ids=True,
        form=case.form.encode(),
    )


def outputs(case: Case, tokenizer: Tokenizer) -> list[list[Delta]]:
    """Each choice's whole output as one delta."""
    found = []
    for number, text in enumerate(case.texts):
        ids = [*tokenizer.encode(text), *(tokenizer.eos_token_ids[:1] if case.eos else ())] or [70]
        logprobs = tuple(
            Logprobs(-0.25 * i, 1, ((token, -0.25 * i),)) for i, token in enumerate(ids)
        )
        found.append(
            [
                Delta(
                    choice=number,
                    token_ids=tuple(ids),
                    logprobs=None if case.logprobs is None else logprobs,
                    finish_reason="stop" if case.eos else "length",
                    cached_tokens=1,
                )
            ]
        )
    return found


def cut(deltas: Sequence[Delta], sizes: Sequence[int]) -> list[Delta]:
    """The same output in pieces of these sizes; the last size is repeated."""
    singles = [single for delta in deltas for single in single_tokens(delta)]
    pieces: list[Delta] = []
    while singles:
        size = max(1, sizes[min(len(pieces), len(sizes) - 1)])
        some, singles = singles[:size], singles[size:]
        logprobs = None
        if some[0].logprobs is not None:
            logprobs = tuple(p for each in some for p in each.logprobs or ())
        ids = tuple(token for each in some for token in each.token_ids)
        pieces.append(some[-1]._replace(token_ids=ids, logprobs=logprobs))
    return pieces


def interleaved(choices: Sequence[Sequence[Delta]], turns: Sequence[int]) -> list[Delta]:
    """Merges the choices' pieces; `turns` lists which choice is next."""
    rest = [list(deltas) for deltas in choices]
    merged: list[Delta] = []
    for turn in (*turns, *range(10_000)):
        if not any(rest):
            return merged
        deltas = rest[turn % len(rest)]
        if deltas:
            merged.append(deltas.pop(0))
    raise AssertionError("too long")


class Scripted:
    """A generation of given deltas, token by token as in sessions."""

    def __init__(self, deltas: Sequence[Delta]) -> None:
        self._deltas = deltas

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for delta in self._deltas:
            for single in single_tokens(delta):
                yield single

    async def stop_choice(self, choice: int, tokens: int) -> None: ...

    async def cancel(self) -> None: ...

    def leave(self) -> None: ...


def stream(case: Case, model: ServedModel, deltas: Sequence[Delta], had: Position) -> list[bytes]:
    """The events that a client gets after those that it has."""
    kept = stored(case)
    answer = answer_of(kept, model)
    events = ResumableEvents(
        REQUEST_ID, len(case.texts), had, named=answer.named, numbered=answer.numbered
    )

    async def run() -> list[bytes]:
        reading = Run(
            Accepted(kept.requests[0], sampling_of(kept), Scripted(deltas)), model.tokenizer
        )
        sent = []
        async for piece in reading.pieces():
            sent.append(events.piece(piece, answer.chunks(piece)))
        usage = Usage()
        usage.add(reading.usage)
        sent += [events.closing(chunk) for chunk in answer.closing(usage)]
        events.end()
        return [each + b"\n\n" for each in b"".join(sent).split(b"\n\n") if each]

    return asyncio.run(run())


def by_choice(events: Sequence[bytes]) -> dict[bytes, list[bytes]]:
    """Contents of events by choice. The order between choices is not tested."""
    found: dict[bytes, list[bytes]] = {}
    for event in events:
        _, data = event.split(b"\n", 1)
        index = re.search(rb'"index":(\d+)', data)
        found.setdefault(index[1] if index else b"usage", []).append(data)
    return found


def position(event: bytes) -> Position:
    return parse_event_id(event.split(b"\n")[0].removeprefix(b"id: ").decode(), REQUEST_ID)


TEXT = st.text(alphabet="ab \n.é你🦊🙂", max_size=12)
CASES = st.builds(
    Case,
    texts=st.lists(TEXT, min_size=1, max_size=3).map(tuple),
    stop=st.lists(st.sampled_from(["ab", "a\n", "🦊", "你é", ".", "bb"]), max_size=2).map(tuple),
    operation=st.sampled_from(["chat", "text_completion"]),
    logprobs=st.sampled_from([None, 1]),
    include_usage=st.booleans(),
    eos=st.booleans(),
)
SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)
TURNS = st.lists(st.integers(0, 2), max_size=30)


@settings(deadline=None, max_examples=60)
@given(case=CASES, sizes=st.tuples(SIZES, SIZES), turns=st.tuples(TURNS, TURNS))
def test_a_stream_resumed_after_any_event_has_exactly_the_others(
    model: ServedModel,
    case: Case,
    sizes: tuple[list[int], list[int]],
    turns: tuple[list[int], list[int]],
) -> None:
    choices = outputs(case, model.tokenizer)
    first = interleaved([cut(deltas, sizes[0]) for deltas in choices], turns[0])
    again = interleaved([cut(deltas, sizes[1]) for deltas in choices], turns[1])

    whole = stream(case, model, first, START)

    for count in range(1, len(whole) + 1):
        rest = stream(case, model, again, position(whole[count - 1]))
        assert by_choice(whole) == by_choice([*whole[:count], *rest])
        ids = [event.split(b"\n")[0] for event in (*whole[:count], *rest)]
        assert ids[-1] == whole[-1].split(b"\n")[0]
        assert len(set(ids)) == len(ids)


PARSED = st.builds(
    Case,
    texts=st.lists(
        st.sampled_from(
            ["<think>", "</think>", "\n", "a", "<tool_call>", "</tool_call>", '{"name": "f", ']
            + ['"arguments": {"a": 1}}', '<tool_call>{"name": "g", "arguments": {"b": "c"}}']
        ),
        max_size=8,
    ).map(lambda shards: ("".join(shards),)),
    operation=st.sampled_from(["chat", "responses", "messages"]),
    logprobs=st.sampled_from([None, 1]),
    eos=st.booleans(),
    form=st.builds(
        OutputForm,
        calls=st.sampled_from([None, "hermes"]),
        reasoning=st.sampled_from([None, "qwen3"]),
        single_call=st.booleans(),
    ),
)


@settings(deadline=None, max_examples=40)
@given(case=PARSED, sizes=st.tuples(SIZES, SIZES), places=st.tuples(*[st.integers(0, 400)] * 3))
def test_answers_with_calls_or_reasoning_are_continued_too(
    model: ServedModel, case: Case, sizes: tuple[list[int], list[int]], places: tuple[int, ...]
) -> None:
    (deltas,) = outputs(case, model.tokenizer)
    whole = stream(case, model, cut(deltas, sizes[0]), START)

    for count in {1 + place % len(whole) for place in places}:
        rest = stream(case, model, cut(deltas, sizes[1]), position(whole[count - 1]))
        assert [*whole[:count], *rest] == whole


def test_numbered_events_are_continued_by_their_number(model: ServedModel) -> None:
    case = Case(texts=("Hello world",), operation="responses")
    deltas = outputs(case, model.tokenizer)[0]
    whole = stream(case, model, deltas, START)

    for count in range(1, len(whole) + 1):
        assert stream(case, model, deltas, Position((count,))) == whole[count:]


def test_a_different_answer_is_not_continued(model: ServedModel) -> None:
    case = Case(texts=("Hello world", "abc"))
    other = Case(texts=("Hello earth", "abc"))
    whole = stream(case, model, interleaved(outputs(case, model.tokenizer), ()), START)
    deltas = interleaved(outputs(other, model.tokenizer), ())

    with pytest.raises(ApiError, match="another one"):
        stream(other, model, deltas, position(whole[-2]))


def test_equal_choices_are_kept_separate(model: ServedModel) -> None:
    case, other = Case(texts=("abc", "abc")), Case(texts=("abd", "abd"))
    whole = stream(case, model, interleaved(outputs(case, model.tokenizer), ()), START)

    with pytest.raises(ApiError, match="another one"):
        deltas = interleaved(outputs(other, model.tokenizer), ())
        stream(other, model, deltas, position(whole[-2]))


def test_a_shorter_answer_is_not_continued(model: ServedModel) -> None:
    case, other = Case(texts=("Hello world and more",)), Case(texts=("Hello",))
    whole = stream(case, model, outputs(case, model.tokenizer)[0], START)

    with pytest.raises(ApiError) as refused:
        stream(other, model, outputs(other, model.tokenizer)[0], position(whole[-2]))

    assert (refused.value.status, refused.value.code) == (409, "stream_reset")


def test_a_bare_count_is_not_checked_against_the_tokens(model: ServedModel) -> None:
    case = Case(texts=("Hello world",))
    deltas = outputs(case, model.tokenizer)[0]
    whole = stream(case, model, deltas, START)

    assert stream(case, model, deltas, Position((2,))) == whole[2:]


@pytest.mark.parametrize(
    "text",
    ["", "1", f"{REQUEST_ID}:", f"{REQUEST_ID}:1", f"{REQUEST_ID}:-1-00000000", f"{REQUEST_ID}:1-0",
     f"{REQUEST_ID}:1..2-00000000", f"{REQUEST_ID}:{'1.' * 40_000}1-00000000", "é", "0.abc:12"],
)  # fmt: skip
def test_invalid_event_ids_are_refused(text: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_event_id(text, REQUEST_ID)

    assert refused.value.status == 400


def test_an_id_of_another_request_is_refused() -> None:
    with pytest.raises(ApiError, match="another request"):
        parse_event_id(f"{'f' * 32}:1-00000000", REQUEST_ID)


def test_an_id_with_other_choices_is_refused() -> None:
    for events in ((1,), (1, 2, 3, 4)):
        with pytest.raises(ApiError, match="choices"):
            ResumableEvents(REQUEST_ID, 2, Position(events, 0))
