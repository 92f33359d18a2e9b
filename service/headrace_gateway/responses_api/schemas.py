"""Bodies of /v1/responses, checked."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr, Tag, WithJsonSchema

from headrace_common.sampling import MAX_LOGPROBS

from ..chat_messages import (
    BY_FORM,
    NO_SERVER_TOOLS,
    NO_SUCH_CHOICE,
    Body,
    FunctionName,
    Off,
    ToolMode,
    nothing_but,
)
from ..schemas import LEAVE_OUT, MAX_TOOLS, UNSUPPORTED, GenerationBody

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"

_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Input = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


class FunctionTool(Body):
    type: Annotated[Literal["function"], nothing_but("function", NO_SERVER_TOOLS)]
    name: FunctionName
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class NamedFunction(Body):
    type: Annotated[Literal["function"], nothing_but("function", NO_SUCH_CHOICE)]
    name: FunctionName


class PlainFormat(Body):
    type: Literal["text", "json_object"]


class SchemaFormat(Body):
    type: Literal["json_schema"]
    name: StrictStr
    schema_: dict[str, Any] = Field(alias="schema")
    description: StrictStr | None = None
    strict: StrictBool | None = None


class TextOptions(Body):
    format: PlainFormat | SchemaFormat | None = Field(None, discriminator="type")


class ReasoningOptions(Body):
    """`summary` auto makes none: reasoning is given as it is."""

    effort: StrictStr | None = None
    summary: Literal["auto"] | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: Off = False


class ResponsesRequest(GenerationBody):
    """OpenAI's fields, then ours. `input` is checked item by item where it is read.

    `prompt_cache_key` changes nothing: prompts are cached by their content.
    """

    input: _Input
    instructions: StrictStr | None = None
    previous_response_id: StrictStr | None = None
    max_output_tokens: StrictInt | None = Field(None, ge=1, lt=2**31)
    temperature: _Number | None = None
    top_p: _Number | None = None
    top_logprobs: StrictInt | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[ToolMode | Annotated[NamedFunction, Tag("dict")], BY_FORM] | None = None
    parallel_tool_calls: StrictBool = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    store: StrictBool | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["disabled"] = "disabled"
    metadata: (
        dict[
            Annotated[str, Field(max_length=64)], Annotated[str, Field(strict=True, max_length=512)]
        ]
        | None
    ) = Field(None, max_length=MAX_METADATA)
    user: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    prompt_cache_key: StrictStr | None = None

    top_k: StrictInt | None = None
    min_p: _Number | None = None
    seed: StrictInt | None = None
    chat_template_kwargs: dict[str, Any] | None = None


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
