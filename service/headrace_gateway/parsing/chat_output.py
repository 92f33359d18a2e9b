"""Decides what a chat's tools, and its model's reasoning, mean for its prompt, sampling and
output."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace_common.sampling.params import SamplingParams
from headrace_common.structured.structural_format import Format
from headrace_common.structured.structured import StructuredOutputError, StructuredOutputsParams
from headrace_common.text.chat_template import ChatTemplate

from ..errors import ApiError, invalid
from ..models.models import ServedModel
from ..schemas.chat_messages import (
    AllowedToolChoice,
    AllowedTools,
    FunctionDefinition,
    Mode,
    NamedTool,
    Tool,
    ToolChoice,
)
from ..schemas.structured_fields import refused
from ..settings import GatewaySettings
from .harmony.header import CALL, OPENAI, OPENAI_GPTOSS, RETURN
from .harmony.header import MARKERS as HARMONY_MARKERS
from .output import NAMED, REQUIRED, OutputForm, writes_short_ids
from .reasoning.catalog import FAMILIES, detect_reasoning_parser
from .strict_calls import constrained_answer, forced_calls, may_reason, strict_calls
from .tool_calls.arguments import kinds
from .tool_calls.catalog import MARKERS, detect_tool_parser
from .tool_calls.constraint import answer_format
from .tool_calls.elements import ELEMENTS

_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tooling:
    """The tools of one request. `parallel` False allows at most one call."""

    tools: Sequence[Tool] = ()
    choice: Mode | NamedTool = "auto"
    parallel: bool = True

    @property
    def forced(self) -> bool:
        return self.choice not in ("none", "auto")

    @property
    def callable(self) -> bool:
        return bool(self.tools) and self.choice != "none"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tool.function.name for tool in self.tools)

    def for_template(self) -> list[dict[str, Any]] | None:
        """Returns the tools in the form that templates know."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools]
        for tool in tools:
            tool["function"].pop("strict", None)
        return tools or None


def tooling(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, *, parallel: bool = True
) -> Tooling:
    """Returns the tools, checked against each other. Raises ApiError."""
    if isinstance(choice, AllowedToolChoice):
        allowed = choice.allowed_tools
        return tooling(_only(tools or (), allowed), allowed.mode, parallel=parallel)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice needs tools.", param="tool_choice")
        return Tooling()
    checked = Tooling(tools=tools, choice=choice or "auto", parallel=parallel)
    twice = {name for name in checked.names if checked.names.count(name) > 1}
    if twice:
        raise invalid(
            f"tools: {sorted(twice)[0]!r} is used more than once. Use each name once.",
            param="tools",
        )
    if isinstance(choice, NamedTool):
        _check_name(choice.function.name, checked.names)
    return checked


def _only(tools: Sequence[Tool], allowed: AllowedTools) -> Sequence[Tool]:
    names = [each.function.name for each in allowed.tools]
    for name in names:
        _check_name(name, [tool.function.name for tool in tools])
    return [tool for tool in tools if tool.function.name in names]


def _check_name(name: str, names: Sequence[str]) -> None:
    if name not in names:
        raise invalid(
            f"tool_choice: {name!r} is not one of the tools: {', '.join(names)}.",
            param="tool_choice",
        )


class ChatOutput:
    """Decides how chats of a model are read: by the settings, or by its chat template."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._tool_parser = settings.tool_call_parser
        self._reasoning_parser = settings.reasoning_parser

    def plan(
        self, model: ServedModel, sampling: SamplingParams, asked: Tooling
    ) -> tuple[OutputForm, SamplingParams]:
        """Returns how the output is read, and the sampling that this needs. Raises ApiError."""
        template = model.chat_template
        if template is None:
            return OutputForm(), sampling  # the prompt encoder refuses such a model
        form = OutputForm(reasoning=self._reasoning(template))
        if form.reasoning is None and sampling.thinking_token_budget is not None:
            raise _no_reasoning(model)
        if asked.callable:
            form, sampling = self._with_tools(model, template, form, sampling, asked)
        if form.reasoning is not None and form.calls != OPENAI:
            sampling = _constrain_answer(form, sampling)
        if form.reasoning == OPENAI_GPTOSS:
            sampling = _ending_turns(model, sampling)
        return form, _showing_markers(model, form, sampling)

    def reasons(self, model: ServedModel) -> bool:
        """Whether the model's reasoning is recognised."""
        template = model.chat_template
        return template is not None and self._reasoning(template) is not None

    def _reasoning(self, template: ChatTemplate) -> str | None:
        if self._reasoning_parser == "auto":
            return detect_reasoning_parser(template.source)
        return None if self._reasoning_parser == "none" else self._reasoning_parser

    def _with_tools(
        self,
        model: ServedModel,
        template: ChatTemplate,
        form: OutputForm,
        sampling: SamplingParams,
        asked: Tooling,
    ) -> tuple[OutputForm, SamplingParams]:
        if "tools" not in template.variables:
            raise _unsupported(f"the chat template of {model.name} shows the model no tools")
        parser = self._parser(template)
        form = replace(
            form,
            reasoning=OPENAI_GPTOSS if parser == OPENAI else form.reasoning,
            calls=parser,
            tools=asked.names,
            kinds=_kinds(parser, asked.tools),
            single_call=not asked.parallel,
            short_ids=writes_short_ids(parser),
        )
        if asked.forced:
            return _forced(template, form, sampling, asked)
        if parser is None:
            raise _unsupported(
                f"it is not known how {model.name} writes calls: use tool_choice required or a "
                "tool's name, or have the server's tool_call_parser set"
            )
        return form, _strict(template, form, sampling, asked)

    def _parser(self, template: ChatTemplate) -> str | None:
        if self._tool_parser == "auto":
            return detect_tool_parser(template.source)
        return None if self._tool_parser == "none" else self._tool_parser


def _no_reasoning(model: ServedModel) -> ApiError:
    return invalid(
        f"thinking_token_budget: no markers of reasoning are known for {model.name}; leave it out, "
        "or have the server's reasoning_parser set.",
        param="thinking_token_budget",
        code="unsupported_parameter",
    )


def _unsupported(reason: str) -> ApiError:
    return invalid(f"tools: {reason}.", param="tools", code="tools_unsupported")


def _forced(
    template: ChatTemplate, form: OutputForm, sampling: SamplingParams, asked: Tooling
) -> tuple[OutputForm, SamplingParams]:
    """Constrains the output to calls: in the model's own form, or else in JSON.

    The model then gives no answer, whatever an answer would have to match.
    """
    tools, once = asked.tools, form.single_call
    if isinstance(asked.choice, NamedTool):
        name = asked.choice.function.name
        tools, once = [each for each in asked.tools if each.function.name == name], True
    form = replace(form, tools=tuple(each.function.name for each in tools), single_call=once)
    try:
        constraint = forced_calls(tools, form, template.source)
    except StructuredOutputError:
        constraint = None
    if constraint is None:
        form, constraint = _forced_json(form, tools, asked)
    return form, replace(sampling, structured_outputs=constraint)


def _forced_json(
    form: OutputForm, tools: Sequence[Tool], asked: Tooling
) -> tuple[OutputForm, StructuredOutputsParams]:
    named = isinstance(asked.choice, NamedTool)
    schema = _parameters(tools[0].function) if named else _array_of_calls(asked)
    try:
        constraint = StructuredOutputsParams(json=schema)
    except StructuredOutputError as error:
        raise refused("tools", error) from error
    return replace(form, calls=NAMED if named else REQUIRED), constraint


def _strict(
    template: ChatTemplate, form: OutputForm, sampling: SamplingParams, asked: Tooling
) -> SamplingParams:
    answer = _answer(sampling.structured_outputs)
    try:
        constraint = strict_calls(asked.tools, form, template.source, answer)
    except StructuredOutputError as error:
        raise refused("tools", error) from error
    return sampling if constraint is None else replace(sampling, structured_outputs=constraint)


def _answer(constraint: StructuredOutputsParams | None) -> Format | None:
    """Returns what an answer must match if calls may come instead."""
    return None if constraint is None else answer_format(constraint)


def _constrain_answer(form: OutputForm, sampling: SamplingParams) -> SamplingParams:
    """Constrains only what follows the reasoning."""
    constraint = sampling.structured_outputs
    if constraint is None or may_reason(constraint):
        return sampling
    try:
        return replace(sampling, structured_outputs=constrained_answer(constraint, form))
    except StructuredOutputError as error:
        raise refused(f"structured_outputs.{error.field}", error) from error


def _kinds(parser: str | None, tools: Sequence[Tool]) -> Mapping[str, Mapping[str, str]]:
    """Returns how the tools' arguments are written, for forms whose calls do not say it."""
    if parser not in ELEMENTS:
        return {}
    return {tool.function.name: kinds(tool.function.parameters) for tool in tools}


def _parameters(tool: FunctionDefinition) -> Mapping[str, Any]:
    return tool.parameters or _NO_ARGUMENTS


def _array_of_calls(asked: Tooling) -> Mapping[str, Any]:
    """Returns a schema for `[{"name": ..., "parameters": {...}}, ...]`."""
    definitions: dict[str, Any] = {}
    calls = []
    for number, tool in enumerate(asked.tools):
        parameters = dict(_parameters(tool.function))
        for place in ("$defs", "definitions"):
            own = parameters.pop(place, {})
            if isinstance(own, dict):
                moved = _moved(own, number)
                definitions |= {f"{number}.{name}": schema for name, schema in moved.items()}
        calls.append(_call(tool.function.name, _moved(parameters, number)))
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not asked.parallel:
        schema["maxItems"] = 1
    return {**schema, "$defs": definitions} if definitions else schema


def _call(name: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: dict[str, Any], number: int) -> dict[str, Any]:
    """Returns the schema with references that point to where its definitions are now."""
    text = json.dumps(schema)
    for place in ("$defs", "definitions"):
        text = text.replace(f'"$ref": "#/{place}/', f'"$ref": "#/$defs/{number}.')
    moved: dict[str, Any] = json.loads(text)
    return moved


def _ending_turns(model: ServedModel, sampling: SamplingParams) -> SamplingParams:
    """Adds the tokens that end Harmony's turns, whether or not the checkpoint has them."""
    ids = (model.tokenizer.token_to_id(end) for end in (CALL, RETURN))
    known = {None, *model.tokenizer.eos_token_ids, *sampling.stop_token_ids}
    more = tuple(each for each in ids if each is not None and each not in known)
    return replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *more)) if more else sampling


def _showing_markers(
    model: ServedModel, form: OutputForm, sampling: SamplingParams
) -> SamplingParams:
    """Makes special tokens visible that parsers need as markers in the text."""
    markers = MARKERS.get(form.calls or "", ())
    if form.reasoning == OPENAI_GPTOSS:
        markers = HARMONY_MARKERS
    elif form.reasoning is not None:
        family = FAMILIES[form.reasoning]
        markers = (*markers, family.opening, family.closing)
    tokenizer = model.tokenizer
    special = any(tokenizer.token_to_id(marker) in tokenizer.special_ids for marker in markers)
    return replace(sampling, skip_special_tokens=False) if special else sampling
