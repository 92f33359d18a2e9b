"""From a body of /v1/responses to sampling, tools and what its answer repeats."""

from collections.abc import Mapping
from typing import Any

from headrace_common.sampling import SamplingParams
from headrace_common.structured import StructuredOutputError, StructuredOutputsParams

from ..chat_messages import (
    AllowedToolChoice,
    AllowedTools,
    FunctionDefinition,
    Mode,
    NamedTool,
    Tool,
    ToolChoice,
    ToolName,
)
from ..chat_output import Tooling, tooling
from ..errors import invalid
from ..structured_fields import refused
from .schemas import (
    LOGPROBS,
    AllowedFunctions,
    FunctionTool,
    NamedFunction,
    ResponsesRequest,
    SchemaFormat,
)


def sampling_of(body: ResponsesRequest) -> SamplingParams:
    """Raises SamplingError and ApiError."""
    shows_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not shows_logprobs:
        raise invalid(
            "top_logprobs needs message.output_text.logprobs in include.", param="top_logprobs"
        )
    names = ("temperature", "top_p", "top_k", "min_p", "seed")
    given = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
    return SamplingParams(
        **given,
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if shows_logprobs else None,
        structured_outputs=_structured(body),
    )


def tooling_of(body: ResponsesRequest) -> Tooling:
    """Raises ApiError."""
    tools = [
        Tool(
            type="function",
            function=FunctionDefinition(
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
            ),
        )
        for tool in body.tools or ()
    ]
    return tooling(tools, _choice(body.tool_choice), parallel=body.parallel_tool_calls)


def _choice(given: Mode | NamedFunction | AllowedFunctions | None) -> ToolChoice | None:
    """As a chat has it."""
    match given:
        case NamedFunction():
            return _named(given)
        case AllowedFunctions():
            allowed = AllowedTools(mode=given.mode, tools=[_named(each) for each in given.tools])
            return AllowedToolChoice(type="allowed_tools", allowed_tools=allowed)
        case _:
            return given


def _named(function: NamedFunction) -> NamedTool:
    return NamedTool(type="function", function=ToolName(name=function.name))


def echo_of(body: ResponsesRequest, sampling: SamplingParams, *, stored: bool) -> Mapping[str, Any]:
    """The fields that a response repeats of its request."""
    text = {} if body.text is None else body.text.model_dump(exclude_none=True, by_alias=True)
    reasoning = {"effort": None, "summary": None}
    if body.reasoning is not None:
        reasoning |= body.reasoning.model_dump(exclude_unset=True)
    choice = body.tool_choice or "auto"
    return {
        "background": body.background,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "prompt_cache_retention": body.prompt_cache_retention,
        "reasoning": reasoning,
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": stored,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": body.truncation,
        "user": body.user,
    }


def _tool(tool: FunctionTool) -> Mapping[str, Any]:
    given = tool.model_dump(exclude_unset=True, by_alias=True)
    return {"description": None, "parameters": None, "strict": None, **given}


def _structured(body: ResponsesRequest) -> StructuredOutputsParams | None:
    form = None if body.text is None else body.text.format
    if form is None or form.type == "text":
        return None
    try:
        if isinstance(form, SchemaFormat):
            return StructuredOutputsParams(json=form.schema_)
        return StructuredOutputsParams(json_object=True)
    except StructuredOutputError as error:
        raise refused("text.format", error) from error
