"""Constrains calls to their tools' schemas, in every tool-call format.

There are three cases: optional calls of tools with `strict`; forced calls; and either calls or an
answer in a given format. Reasoning is never constrained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace_common.sampling.params import SamplingParams
from headrace_common.structured import structural_tag
from headrace_common.structured.structural_format import Alternatives, Format, Rules
from headrace_common.structured.structural_tag import ReasoningFormat, StructuralTag
from headrace_common.structured.structured import StructuredOutputError, StructuredOutputsParams
from headrace_common.text.chat_template import ChatTemplate
from headrace_common.text.tokenizer import Tokenizer

from ..schemas.chat_messages import FunctionDefinition, Tool
from .harmony import header as harmony
from .harmony.constraint import final_format, from_within
from .output import OutputForm
from .reasoning.catalog import FAMILIES, begin_of, opens_reasoning
from .reasoning.think import Begin
from .tool_calls.bare import bare
from .tool_calls.catalog import FORMATS
from .tool_calls.constraint import CallConstraint, Function, answer_format

MAX_TOOLS = 128
_NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


def strict_calls(
    tools: Sequence[Tool],
    form: OutputForm,
    template: str,
    answer: Format | None = None,
) -> StructuredOutputsParams | None:
    """Returns the constraint on text with calls of these tools; None if nothing is constrained.

    With `answer`, a text has either only calls or an answer in this format. Raises
    StructuredOutputError.
    """
    strict = any(tool.function.strict for tool in tools)
    if form.calls is None or not (strict or answer):
        return None
    if len(tools) > MAX_TOOLS:
        raise StructuredOutputError("json", f"strict tools may be among at most {MAX_TOOLS}")
    constraint = CallConstraint(
        tuple(map(_function, tools)), once=form.single_call, template=template
    )
    written = (
        FORMATS[form.calls](constraint)
        if answer is None
        else _either(constraint, answer, form.calls)
    )
    return _params(StructuralTag(written, _reasoning(form, Begin.OPEN, closed=answer is not None)))


def _either(constraint: CallConstraint, answer: Format, calls: str) -> Format:
    rules = answer.rules if isinstance(answer, Rules) else {}
    content = answer.content if isinstance(answer, Rules) else answer
    written = FORMATS[calls](replace(constraint, forced=True, answer=content))
    if isinstance(written, Rules):
        if rules.keys() & written.rules.keys():
            raise StructuredOutputError("structural_tag", "its rules have names of tools")
        rules, written = {**rules, **written.rules}, written.content
    if calls != harmony.OPENAI:
        written = Alternatives((written, content))
    return Rules(rules, written) if rules else written


def forced_calls(
    tools: Sequence[Tool], form: OutputForm, template: str
) -> StructuredOutputsParams | None:
    """Returns the constraint that allows only calls of these tools; None if the format has no
    calls. Raises StructuredOutputError for a tool that cannot be constrained."""
    if form.calls is None:
        return None
    functions = tuple(_strict_function(each.function) for each in tools)
    constraint = CallConstraint(functions, forced=True, once=form.single_call, template=template)
    reasoning = _reasoning(form, Begin.OPEN, closed=True)
    return _params(StructuralTag(FORMATS[form.calls](constraint), reasoning))


def constrained_answer(
    constraint: StructuredOutputsParams, form: OutputForm
) -> StructuredOutputsParams:
    """Returns the constraint on a text if only the part after its reasoning is constrained.

    Raises StructuredOutputError.
    """
    content = answer_format(constraint)
    if form.reasoning == harmony.OPENAI_GPTOSS:
        return _params(StructuralTag(final_format(content)))
    return _params(StructuralTag(content, _reasoning(form, Begin.OPEN, closed=True)))


def at_prompt(
    sampling: SamplingParams,
    form: OutputForm,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    template: ChatTemplate | None = None,
) -> SamplingParams:
    """Returns the sampling for an answer to this prompt, which may end within reasoning or after
    it.

    If the template would have opened the reasoning and has not, the answer begins at once.
    """
    structured = sampling.structured_outputs
    if form.reasoning is None or structured is None or structured.structural_tag is None:
        return sampling
    if form.reasoning == harmony.OPENAI_GPTOSS:
        if not harmony.begin_of(tokenizer, prompt).inside:
            return sampling
        tag = structural_tag.read(structured.structural_tag)
        begun = replace(tag, format=from_within(tag.format))
        return replace(sampling, structured_outputs=_params(begun))
    begin = begin_of(form.reasoning, tokenizer, prompt)
    if begin is Begin.OPEN:
        if template is None or not opens_reasoning(form.reasoning, template):
            return sampling  # unchanged
        begin = Begin.CLOSED
    tag = structural_tag.read(structured.structural_tag)
    closed = tag.reasoning is not None and tag.reasoning.closed
    begun = replace(tag, reasoning=_reasoning(form, begin, closed=closed))
    return replace(sampling, structured_outputs=_params(begun))


def may_reason(structured: StructuredOutputsParams) -> bool:
    """Whether such an output can begin with reasoning."""
    tag = structured.structural_tag
    return isinstance(tag, str) and structural_tag.may_reason(tag)


def _function(tool: Tool) -> Function:
    function = tool.function
    if not function.strict:
        return Function(function.name, None)
    return _strict_function(function)


def _strict_function(function: FunctionDefinition) -> Function:
    return Function(function.name, bare(function.parameters or _NO_ARGUMENTS))


def _reasoning(form: OutputForm, begin: Begin, *, closed: bool) -> ReasoningFormat | None:
    family = FAMILIES.get(form.reasoning or "")
    if family is None or begin is Begin.CLOSED:
        return None
    inside = begin is Begin.INSIDE or family.otherwise_inside
    where = structural_tag.ReasoningBegin.INSIDE if inside else structural_tag.ReasoningBegin.OPEN
    return ReasoningFormat(family.opening, family.closing, where, closed=closed)


def _params(tag: StructuralTag) -> StructuredOutputsParams:
    try:
        text = tag.to_json()
    except (ValueError, TypeError, RecursionError) as error:
        raise StructuredOutputError("json", f"is not valid JSON: {error!s:.200}") from error
    return StructuredOutputsParams(structural_tag=text)
