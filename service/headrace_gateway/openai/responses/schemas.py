"""Schemas that check the bodies of /v1/responses."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, Tag, WithJsonSchema

from headrace_common.sampling.params import MAX_LOGPROBS

from ...limits.fields import FreeObject, Items, Name, Text
from ...schemas.chat_messages import (
    BY_CHOICE,
    MAX_TOOLS,
    NO_SERVER_TOOLS,
    NO_SUCH_CHOICE,
    NO_TOOL_SEARCH,
    Body,
    FunctionName,
    Off,
    ToolMode,
    nothing_but,
    only,
)
from ...schemas.completions import (
    LEAVE_OUT,
    UNSUPPORTED,
    GenerationBody,
    Metadata,
    PromptCacheBody,
    ThinkingTokens,
    Verbosity,
)

MAX_INCLUDED = 64
MAX_CLIENT_METADATA = 64
MAX_CLIENT_METADATA_CHARS = 32_768
NO_CALLS_BY_PROGRAMS = "tools are called by the model itself, and never by programs"
NO_NAMESPACES = "tools have no namespaces here"
NO_ASYNC_CALLS = "an answer ends with its calls"
LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"

_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
ClientMetadata = Annotated[
    dict[
        Annotated[str, Field(max_length=256)],
        Annotated[str, Field(strict=True, max_length=MAX_CLIENT_METADATA_CHARS)],
    ],
    Field(max_length=MAX_CLIENT_METADATA),
]
_Input = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


class FunctionTool(Body):
    """`output_schema` has no effect: the results of tools are plain texts."""

    type: Annotated[Literal["function"], nothing_but("function", NO_SERVER_TOOLS)]
    name: FunctionName
    description: Text | None = None
    parameters: FreeObject | None = None
    strict: StrictBool | None = None
    output_schema: FreeObject | None = None
    async_: Annotated[Any, *only(False, reason=NO_ASYNC_CALLS)] = Field(None, alias="async")
    allowed_callers: Annotated[Any, *only(["direct"], reason=NO_CALLS_BY_PROGRAMS)] = None
    defer_loading: Annotated[Any, *only(False, reason=NO_TOOL_SEARCH)] = None


class NamedFunction(Body):
    type: Annotated[Literal["function"], nothing_but("function", NO_SUCH_CHOICE)]
    name: FunctionName


class AllowedFunctions(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[NamedFunction] = Field(min_length=1, max_length=MAX_TOOLS)


_ToolChoice = Annotated[
    ToolMode | Annotated[NamedFunction, Tag("dict")] | Annotated[AllowedFunctions, Tag("allowed")],
    BY_CHOICE,
]


class PlainFormat(Body):
    type: Literal["text", "json_object"]


class SchemaFormat(Body):
    type: Literal["json_schema"]
    name: Name
    schema_: FreeObject = Field(alias="schema")
    description: Text | None = None
    strict: StrictBool | None = None


class TextOptions(Body):
    """`verbosity` is for chat templates that know it."""

    format: PlainFormat | SchemaFormat | None = Field(None, discriminator="type")
    verbosity: Verbosity | None = None


Summary = Literal["auto", "concise", "detailed"]


class ReasoningOptions(Body):
    """`summary` and `generate_summary`, its older name, have no effect: reasoning is returned
    whole."""

    effort: Name | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    context: Annotated[Any, *only("auto", reason="the chat template decides what it shows")] = None
    mode: Annotated[Any, *only("standard", reason="there is one mode")] = None


class ResponseStreamOptions(Body):
    include_obfuscation: Off = False


# Optional contents that a client can ask for. Contents of images, and of tools that OpenAI's server
# runs, are accepted but never exist here.
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class ResponsesRequest(GenerationBody, PromptCacheBody):
    """OpenAI's fields, then ours. `input` is checked item by item when it is read.

    `metadata` is returned; `client_metadata`, which agents send, is not, and has no effect.
    """

    input: _Input
    instructions: Text | None = None
    previous_response_id: Name | None = None
    max_output_tokens: StrictInt | None = Field(None, ge=1, lt=2**31)
    temperature: _Number | None = None
    top_p: _Number | None = None
    top_logprobs: StrictInt | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: Items[Included] | None = Field(None, max_length=MAX_INCLUDED)
    tools: Items[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: _ToolChoice | None = None
    parallel_tool_calls: StrictBool = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    store: StrictBool | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: Metadata | None = None
    client_metadata: ClientMetadata | None = None
    user: Name | None = None
    safety_identifier: Name | None = None

    top_k: StrictInt | None = None
    min_p: _Number | None = None
    seed: StrictInt | None = None
    thinking_token_budget: ThinkingTokens | None = None
    chat_template_kwargs: FreeObject | None = None


NOT_IN_RESPONSES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    **UNSUPPORTED,
    "access_programs": ((), LEAVE_OUT),
    "image": ((), "this server reads and writes text only"),
    "conversation": ((), "use previous_response_id"),
    "prompt": ((), "send the prompt's text as instructions and input"),
    "max_tool_calls": ((), "this server runs no tools itself"),
    "context_management": ((), "shorten the input yourself"),
    "stop": ((), "use /v1/chat/completions"),
    "n": ((1,), "use /v1/chat/completions"),
}
