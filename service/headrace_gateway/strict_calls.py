"""Calls that a model makes or not: once one begins, it is held to its tool's schema.

For tools with `strict` in the form `<tool_call>{...}</tool_call>`. In reasoning, and where the
markers are special tokens, nothing is held.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace_common import structural_tag
from headrace_common.sampling import SamplingParams
from headrace_common.structural_tag import Reasoning, StructuralTag, Structure
from headrace_common.structured import StructuredOutputsParams
from headrace_common.tokenizer import Tokenizer

from .chat_messages import Tool
from .output import OutputForm
from .reasoning.catalog import FAMILIES, begin_of
from .reasoning.think import Begin
from .tool_calls.catalog import HERMES
from .tool_calls.hermes import CLOSE, OPEN

_ANY: Mapping[str, Any] = {"type": "object"}


def held_calls(
    tools: Sequence[Tool], form: OutputForm, tokenizer: Tokenizer
) -> StructuredOutputsParams | None:
    """What text with calls of these tools must match; None where no call is held.

    Raises StructuredOutputError.
    """
    markers = (OPEN, CLOSE, *_reasoning_markers(form))
    special = any(tokenizer.token_to_id(each) in tokenizer.special_ids for each in markers)
    if special or form.calls != HERMES or not any(tool.function.strict for tool in tools):
        return None
    tag = StructuralTag(tuple(map(_structure, tools)), (OPEN,), _reasoning(form, Begin.OPEN))
    return _params(tag)


def at_prompt(
    sampling: SamplingParams, form: OutputForm, tokenizer: Tokenizer, prompt: Sequence[int]
) -> SamplingParams:
    """The sampling for an answer to this prompt, which may end within reasoning or behind it."""
    structured = sampling.structured_outputs
    if form.reasoning is None or structured is None or structured.structural_tag is None:
        return sampling
    tag = structural_tag.read(structured.structural_tag)
    begin = begin_of(form.reasoning, tokenizer, prompt)
    begun = replace(tag, reasoning=_reasoning(form, begin))
    return replace(sampling, structured_outputs=_params(begun))


def may_reason(structured: StructuredOutputsParams) -> bool:
    """Whether such an output has room for reasoning."""
    tag = structured.structural_tag
    return tag is not None and structural_tag.read(tag).reasoning is not None


def _structure(tool: Tool) -> Structure:
    function = tool.function
    schema = (function.parameters or {**_ANY, "properties": {}}) if function.strict else _ANY
    name = json.dumps(function.name)
    return Structure(f'{OPEN}\n{{"name": {name}, "arguments": ', schema, f"}}\n{CLOSE}")


def _reasoning_markers(form: OutputForm) -> Iterator[str]:
    if form.reasoning is not None:
        family = FAMILIES[form.reasoning]
        yield from (family.opening, family.closing)


def _reasoning(form: OutputForm, begin: Begin) -> Reasoning | None:
    if form.reasoning is None or begin is Begin.BEHIND:
        return None
    family = FAMILIES[form.reasoning]
    inside = begin is Begin.INSIDE or family.otherwise_inside
    where = structural_tag.Begin.INSIDE if inside else structural_tag.Begin.OPEN
    return Reasoning(family.opening, family.closing, where)


def _params(tag: StructuralTag) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tag=tag.to_json())
