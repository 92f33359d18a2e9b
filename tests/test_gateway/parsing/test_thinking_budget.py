"""The limit of reasoning, from each API's field to the engine's request."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from headrace_common.sampling.params import SamplingParams
from headrace_common.sampling.thinking import ThinkingBegin, ThinkingFormat
from headrace_common.text.tokenizer import Tokenizer
from headrace_gateway.parsing.output import OutputForm
from headrace_gateway.parsing.reasoning.catalog import FAMILIES
from headrace_gateway.parsing.thinking_budget import limit_thinking
from headrace_testing.gateway import MODEL, Gateway, prompt_of, serve
from headrace_testing.tokenizers import (
    byte_level_tokenizer,
    harmony_tokenizer,
    write_tool_checkpoint,
)
from headrace_testing.tool_templates import CHATML_WITH_TOOLS

pytestmark = pytest.mark.asyncio(loop_scope="session")
HI = [{"role": "user", "content": "Hi"}]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tools(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    folder = write_tool_checkpoint(tmp_path_factory.mktemp("thinking"), CHATML_WITH_TOOLS)
    async with serve(folder) as running:
        yield running


async def sampling_of(gateway: Gateway, path: str, **fields: Any) -> SamplingParams:
    answer = await gateway.http.post(path, json={"model": MODEL, **fields})
    assert answer.status_code == 200, answer.text
    return gateway.engine.submitted[-1].sampling


async def test_each_api_has_a_field_for_it(tools: Gateway) -> None:
    thinking = {"type": "enabled", "budget_tokens": 5}
    for path, fields in (
        ("/v1/chat/completions", {"messages": HI, "thinking_token_budget": 5}),
        ("/v1/responses", {"input": "Hi", "thinking_token_budget": 5}),
        ("/v1/messages", {"messages": HI, "max_tokens": 9, "thinking": thinking}),
    ):
        sampling = await sampling_of(tools, path, **fields)
        assert sampling.thinking_token_budget == 5
        assert sampling.thinking_format == ThinkingFormat(opening="<think>", closing="</think>")


async def test_the_prompt_tells_whether_reasoning_is_open(tools: Gateway) -> None:
    path = "/v1/chat/completions"
    fields: dict[str, Any] = {"messages": HI, "thinking_token_budget": 0}
    opened = await sampling_of(tools, path, **fields, chat_template_kwargs={"open_thinking": True})
    assert opened.thinking_format is not None
    assert opened.thinking_format.begin is ThinkingBegin.INSIDE
    closed = await sampling_of(
        tools, path, **fields, chat_template_kwargs={"enable_thinking": False}
    )
    assert prompt_of(tools).endswith("</think>\n\n") and closed.thinking_token_budget is None
    free = await sampling_of(tools, path, messages=HI, thinking_token_budget=-1)
    assert free.thinking_token_budget is None


async def test_a_model_without_markers_is_named(gateway: Gateway) -> None:
    answer = await gateway.chat(thinking_token_budget=5)
    completion = await gateway.complete(thinking_token_budget=5)
    wrong = await gateway.chat(thinking_token_budget=-2)
    ignored = await gateway.http.post(
        "/v1/messages",
        json={
            "model": MODEL,
            "messages": HI,
            "max_tokens": 9,
            "thinking": {"type": "enabled", "budget_tokens": 5},
        },
    )

    for refused in (answer, completion):
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "thinking_token_budget")
        assert error["code"] == "unsupported_parameter"
    assert MODEL in answer.json()["error"]["message"]
    assert wrong.status_code == 400 and ignored.status_code == 200


@pytest.mark.parametrize("name", FAMILIES)
async def test_every_form_of_reasoning_has_a_limit(name: str) -> None:
    tokenizer = Tokenizer(byte_level_tokenizer(), special_tokens={}, eos_token_ids=[0])
    sampling = SamplingParams(thinking_token_budget=5)
    family, form = FAMILIES[name], OutputForm(reasoning=name)
    for prompt, expected in (
        ("Go:", ThinkingBegin.INSIDE if family.otherwise_inside else ThinkingBegin.OPEN),
        (f"Go:{family.opening}{family.label}\n", ThinkingBegin.INSIDE),
    ):
        limited = limit_thinking(sampling, form, tokenizer, tokenizer.encode(prompt))
        assert limited.thinking_format == ThinkingFormat(
            opening=family.opening, closing=family.closing, begin=expected
        )


async def test_harmony_continues_with_an_answer_or_a_call() -> None:
    tokenizer = Tokenizer(harmony_tokenizer(), special_tokens={}, eos_token_ids=[0])
    sampling = SamplingParams(thinking_token_budget=5)
    prompt = tokenizer.encode("<|start|>assistant<|channel|>analysis<|message|>So")
    endings = []
    for calls in (None, "openai"):
        form = OutputForm(reasoning="openai_gptoss", calls=calls)
        written = limit_thinking(sampling, form, tokenizer, prompt).thinking_format
        assert written is not None and written.begin is ThinkingBegin.INSIDE
        endings.append(written.ending)
    assert endings == [
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        "<|end|><|start|>assistant",
    ]
