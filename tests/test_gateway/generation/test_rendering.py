"""Templates that engines registered can neither hold a gateway up nor fill its memory."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from headrace_common.pools.limited_pool import TaskLimits
from headrace_common.protocol.registry import RegisteredModel, digest_of
from headrace_common.text.chat_template import ChatTemplate, ChatTemplateError
from headrace_common.text.checkpoint import read_files
from headrace_gateway.errors import ApiError
from headrace_gateway.generation.prompts import ChatOptions, PromptEncoder
from headrace_gateway.generation.rendering import (
    MOST_WAITING,
    MOST_WAITING_OF_TENANT,
    WORKERS,
    Rendering,
)
from headrace_gateway.limits.work import Work, WorkPool
from headrace_gateway.models.loading import load_registered
from headrace_gateway.models.models import ServedModel
from headrace_gateway.schemas.chat_messages import Message
from headrace_testing.images import image_intake

CHAT = [Message(role="user", content="Hi"), Message(role="assistant", content="Ho")]
MACRO = "{% macro one(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}"
UNBOUNDED = MACRO + "{% for m in messages %}{{ one(m) }}{% endfor %}"
BOUNDED = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
# Compares two lists of 2^60 items, in one operation.
ENDLESS = """{% set ns = namespace(a=[], b=[]) %}{% for i in range(60) %}
    {%- set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}"""
HUGE = "{{ '{:>9000000000}'.format('a') }}"


@pytest.fixture
def model(checkpoint: Path) -> ServedModel:
    """The model as an engine has registered it."""
    files = read_files(checkpoint).contents
    entry = RegisteredModel(name="m", digest=digest_of(files), max_model_len=100, created=5)
    return load_registered(entry, files, None)


@pytest.fixture
async def rendering() -> AsyncIterator[Rendering]:
    rendering = Rendering(TaskLimits(timeout=20, cpu_seconds=1, memory_bytes=256 * 2**20))
    yield rendering
    await rendering.close()


@pytest.fixture
def work() -> Iterator[Work]:
    with ThreadPoolExecutor(2) as executor:
        yield WorkPool(executor, 2).of("a")


def with_template(model: ServedModel, source: str) -> ServedModel:
    return replace(model, chat_template=ChatTemplate(source))


async def test_a_chat_is_the_same_wherever_it_is_rendered(
    model: ServedModel, rendering: Rendering, work: Work
) -> None:
    prompts = PromptEncoder(work, rendering, image_intake())
    here = await prompts.chat(with_template(model, BOUNDED), CHAT, ChatOptions())
    there = await prompts.chat(with_template(model, UNBOUNDED), CHAT, ChatOptions())

    assert there == here
    assert model.tokenizer.decode(here.token_ids) == "<user>Hi<assistant>Ho"


def test_only_unbounded_templates_of_registered_models_are_rendered_in_a_worker(
    model: ServedModel,
) -> None:
    unbounded, bounded = with_template(model, UNBOUNDED), with_template(model, BOUNDED)

    assert unbounded.rendered_in_worker and not bounded.rendered_in_worker
    assert not replace(unbounded, registered=False).rendered_in_worker
    assert not replace(model, chat_template=None).rendered_in_worker


@pytest.mark.parametrize(
    ("source", "reason"), [(ENDLESS, "exceeded its limit: (cpu|timeout)"), (HUGE, "MemoryError")]
)
async def test_a_too_expensive_template_fails_only_its_own_chat(
    model: ServedModel, rendering: Rendering, work: Work, source: str, reason: str
) -> None:
    prompts = PromptEncoder(work, rendering, image_intake())

    with pytest.raises(ChatTemplateError, match=reason):
        await prompts.chat(with_template(model, source), CHAT, ChatOptions())
    assert await prompts.chat(with_template(model, UNBOUNDED), CHAT, ChatOptions())


async def test_the_error_of_a_chat_template_reaches_the_client(
    model: ServedModel, rendering: Rendering, work: Work
) -> None:
    refusing = with_template(model, MACRO + "{{ raise_exception('roles must alternate') }}")

    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        await PromptEncoder(work, rendering, image_intake()).chat(refusing, CHAT, ChatOptions())


@pytest.mark.parametrize(
    ("before", "status"),
    [
        (["a"] * (WORKERS - 1 + MOST_WAITING_OF_TENANT), 429),
        ([f"tenant {number}" for number in range(WORKERS + MOST_WAITING)], 503),
    ],
)
async def test_a_crowd_of_chats_is_refused(
    rendering: Rendering, before: list[str], status: int
) -> None:
    template = ChatTemplate(UNBOUNDED)
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    first, *_, last = await asyncio.gather(
        *(rendering.render(template, chat, tenant) for tenant in [*before, "a"]),
        return_exceptions=True,
    )

    assert first == "<user>Hi"
    assert isinstance(last, ApiError)
    assert (last.status, last.code) == (status, "templates_busy")
