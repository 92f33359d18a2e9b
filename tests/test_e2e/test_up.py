"""`headrace up` as a person starts it, and the official OpenAI SDK as its client."""

import asyncio
import re
import signal
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import (
    APIStatusError,
    AsyncOpenAI,
    BadRequestError,
    NotFoundError,
    OpenAI,
    UnprocessableEntityError,
)
from openai.types.chat import ChatCompletionMessageParam

from headrace_testing.headrace_up import MODEL, UpProcess, gone
from headrace_testing.processes import until

TEXTS = Path(__file__).parents[2] / "demo" / "text"
STORY: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me a story."}]
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def client(served: UpProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def story(client: OpenAI, **fields: Any) -> Any:
    """The beginning of the model's greedy story, as an object of the SDK."""
    arguments = {"max_tokens": 24, "temperature": 0, **fields}
    return client.chat.completions.create(model=MODEL, messages=STORY, **arguments)


def continuation(client: OpenAI, **fields: Any) -> Any:
    arguments = {"max_tokens": 16, "temperature": 0, **fields}
    return client.completions.create(model=MODEL, prompt=PROMPT, **arguments)


def vocabulary() -> set[str]:
    """Every word of the texts on which the demo model was trained."""
    texts = [str(tomllib.loads(path.read_text())) for path in TEXTS.glob("*.toml")]
    return set(words(" ".join(texts)))


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


# First contact


@pytest.mark.parametrize("greeting", ["Hello!", "Good morning!", "How are you?"])
def test_a_greeting_is_answered_in_readable_english(client: OpenAI, greeting: str) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": greeting}], temperature=0
    )
    text = answer.choices[0].message.content or ""
    assert re.fullmatch(r"[A-Z][A-Za-z ,.'!?-]+[.!?]", text)
    assert len(words(text)) >= 3
    assert set(words(text)) <= vocabulary()
    assert answer.choices[0].finish_reason == "stop"


def test_the_served_model_is_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "headrace"


# Chat and completions, whole and streamed, sync and async


def test_a_chat_has_the_same_answer_streamed_and_whole(client: OpenAI) -> None:
    whole = story(client).choices[0]
    chunks = list(story(client, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.message.content
    assert [c.choices[0].finish_reason for c in chunks][-1] == whole.finish_reason == "length"
    assert all(c.usage is None for c in chunks)


def test_a_completion_has_the_same_answer_streamed_and_whole(client: OpenAI) -> None:
    whole = continuation(client).choices[0]
    chunks = list(continuation(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text != ""
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "length"


async def test_async_clients_get_the_same(client: OpenAI, served: UpProcess) -> None:
    expected = await asyncio.to_thread(lambda: story(client).choices[0].message.content)
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as other:
        arguments: Any = {"model": MODEL, "max_tokens": 24, "temperature": 0}
        whole = await other.chat.completions.create(messages=STORY, **arguments)
        stream: Any = await other.chat.completions.create(messages=STORY, stream=True, **arguments)
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
        text = await other.completions.create(prompt=PROMPT, **arguments)
        text_stream: Any = await other.completions.create(prompt=PROMPT, stream=True, **arguments)
        texts = [chunk.choices[0].text async for chunk in text_stream]
    assert whole.choices[0].message.content == "".join(parts) == expected
    assert text.choices[0].text == "".join(texts) != ""


# Parameters of requests


def test_two_choices(client: OpenAI) -> None:
    whole = story(client, n=2, temperature=1, seed=1)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert len({choice.message.content for choice in whole.choices}) == 2
    assert whole.usage.completion_tokens == 48
    parts = {0: "", 1: ""}
    for chunk in story(client, n=2, temperature=1, seed=1, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
    assert list(parts.values()) == [choice.message.content for choice in whole.choices]


def test_a_stop_string_that_spans_tokens_ends_the_text_before_it(client: OpenAI) -> None:
    whole = story(client, logprobs=True).choices[0]
    tokens = [entry.token for entry in whole.logprobs.content]
    stop = tokens[9][-1:] + tokens[10] + tokens[11][:1]
    assert stop not in tokens
    expected = whole.message.content.partition(stop)[0]
    stopped = story(client, stop=[stop, "never said"]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (expected, "stop")
    chunks = list(story(client, stop=stop, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_chat_logprobs(client: OpenAI) -> None:
    choice = story(client, logprobs=True, top_logprobs=3).choices[0]
    entries = choice.logprobs.content
    assert b"".join(bytes(e.bytes) for e in entries).decode() == choice.message.content
    for entry in entries:
        top = [candidate.logprob for candidate in entry.top_logprobs]
        assert top == sorted(top, reverse=True) and len(top) == 3
        assert (entry.token, entry.logprob) == (entry.top_logprobs[0].token, top[0])
        assert entry.logprob <= 0


def test_completion_logprobs(client: OpenAI) -> None:
    choice = continuation(client, logprobs=2).choices[0]
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text
    assert found.text_offset[0] in (0, len(PROMPT)) and len(found.token_logprobs) == 16
    assert all(len(top) == 2 and max(top.values()) <= 0 for top in found.top_logprobs)


def test_a_seed_repeats_a_text_and_another_seed_makes_another(client: OpenAI) -> None:
    texts = [
        story(client, temperature=1, seed=seed).choices[0].message.content
        for seed in (7, 7, 8, 9, 10)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 4


def test_usage_counts_tokens(client: OpenAI, served: UpProcess) -> None:
    body = {"model": MODEL, "messages": STORY}
    counted = httpx.post(f"{served.url}/tokenize", json=body).json()["count"]
    usage = story(client).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (counted, 24)
    assert usage.total_tokens == counted + 24
    *chunks, last = story(client, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (counted, 24)
    assert all(chunk.usage is None for chunk in chunks)


# Errors


@pytest.mark.parametrize(
    ("fields", "kind", "param", "code"),
    [
        ({"model": "gpt-4o"}, NotFoundError, "model", "model_not_found"),
        ({"temperature": -1}, BadRequestError, "temperature", None),
        ({"top_p": 1.5}, BadRequestError, "top_p", None),
        ({"max_tokens": 100_000}, BadRequestError, "messages", "context_length_exceeded"),
        ({"extra_body": {"no_such_field": 1}}, BadRequestError, "no_such_field", None),
    ],
)
def test_errors_are_typed_and_name_the_field(
    client: OpenAI,
    fields: dict[str, Any],
    kind: type[APIStatusError],
    param: str,
    code: str | None,
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": STORY, **fields})
    assert not isinstance(caught.value, UnprocessableEntityError)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert code is None or caught.value.code == code


def test_a_prompt_over_the_context_is_refused(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="maximum context length is 2048") as caught:
        client.completions.create(model=MODEL, prompt="word " * 5000)
    assert caught.value.code == "context_length_exceeded"


# Children that die, and the end


def test_killed_children_come_back_and_an_interrupt_drains(
    client: OpenAI, served: UpProcess
) -> None:
    """The last test with these processes: it ends them."""
    arguments: Any = {
        "model": MODEL,
        "messages": STORY,
        "temperature": 0,
        "max_tokens": 300,
        "extra_body": {"ignore_eos": True},
    }
    expected = client.chat.completions.create(**arguments).choices[0].message.content
    assert streamed_while(client, arguments, lambda: kill(served, "headrace_engine")) == expected
    kill(served, "headrace_gateway")
    until(lambda: ready(served), "the gateway to be back")
    children = served.children()
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as another:
        assert streamed_while(another, arguments, served.interrupt) == expected
    assert served.wait() == 0
    assert gone(children)
    assert "draining" in served.printed


def streamed_while(client: OpenAI, arguments: Any, disturb: Callable[[], None]) -> str:
    """The text of a stream; `disturb` runs when the stream has begun."""
    text, disturbed = "", False
    for chunk in client.chat.completions.create(stream=True, **arguments):
        text += chunk.choices[0].delta.content or ""
        if text and not disturbed:
            disturb()
            disturbed = True
    return text


def kill(up: UpProcess, program: str) -> None:
    process = up.child(program)
    process.send_signal(signal.SIGKILL)
    until(lambda: gone([process]), f"{program} to be dead")


def ready(up: UpProcess) -> bool:
    try:
        return httpx.get(f"{up.url}/health/ready").status_code == 200
    except httpx.TransportError:
        return False
