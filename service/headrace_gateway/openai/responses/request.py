"""Turns a body of /v1/responses into sampling, tools and what its answer repeats."""

from collections.abc import Mapping
from typing import Any

from headrace_common.sampling.params import SamplingParams
from headrace_common.structured.structured import StructuredOutputError, StructuredOutputsParams

from ...errors import invalid
from ...parsing.chat_output import Tooling, tooling
from ...schemas.chat_messages import (
    AllowedToolChoice,
    AllowedTools,
    Mode,
    ToolChoice,
    function_tool,
    named_tool,
)
from ...schemas.completions import thinking_limit
from ...schemas.structured_fields import refused
from .schemas import (
    LOGPROBS,
    AllowedFunctions,
    FunctionTool,
    NamedFunction,
    ResponsesRequest,
    SchemaFormat,
)


def sampling_of(body: ResponsesRequest) -> SamplingParams:
    """Returns the request's sampling. Raises SamplingError and ApiError."""
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
        thinking_token_budget=thinking_limit(body.thinking_token_budget),
    )


def tooling_of(body: ResponsesRequest) -> Tooling:
    """Returns the request's tools. Raises ApiError."""
    tools = [
        function_tool(tool.name, tool.description, tool.parameters, tool.strict)
        for tool in body.tools or ()
    ]
    return tooling(tools, _choice(body.tool_choice), parallel=body.parallel_tool_calls)


def _choice(given: Mode | NamedFunction | AllowedFunctions | None) -> ToolChoice | None:
    """Returns the choice of tools in a chat's form."""
    match given:
        case NamedFunction():
            return named_tool(given.name)
        case AllowedFunctions():
            allowed = AllowedTools(
                mode=given.mode, tools=[named_tool(each.name) for each in given.tools]
            )
            return AllowedToolChoice(type="allowed_tools", allowed_tools=allowed)
        case _:
            return given


def echo_of(body: ResponsesRequest, sampling: SamplingParams, *, stored: bool) -> Mapping[str, Any]:
    """Returns the fields that a response repeats of its request."""
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
