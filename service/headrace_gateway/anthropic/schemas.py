"""Bodies of /v1/messages, checked."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt, WithJsonSchema

from headrace_common.sampling.params import MAX_STOP_STRINGS

from ..limits.fields import FreeObject, Items, Name, Text
from ..schemas.chat_messages import (
    MAX_PARTS,
    MAX_TOOLS,
    NO_SERVER_TOOLS,
    NO_TOOL_SEARCH,
    Body,
    FunctionName,
    ImagePart,
    file_part,
    image_part,
    nothing_but,
    only,
)
from ..schemas.completions import LEAVE_OUT, MAX_MESSAGES, UNSUPPORTED, GenerationBody

MAX_EXAMPLES = 64
MAX_EDITS = 16
_NO_TOOLSETS = "toolsets are not supported; list the tools"
CLEAR_THINKING = "clear_thinking_20251015"
_NO_EDITS = "shorten the messages yourself; only thinking can be cleared, which templates do"

_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


def _as_blocks(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


# A string means one text block.
_OR_TEXT = (
    BeforeValidator(_as_blocks),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
)


class CacheControl(Body):
    """Accepted without effect: prompts are always cached, by their content."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Name | None = None


class TextBlock(Body):
    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = None
    citations: list[Any] | None = Field(None, max_length=0)


_Texts = Annotated[Items[TextBlock], Field(max_length=MAX_PARTS), *_OR_TEXT]


class EncodedSource(Body):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: Text

    def chat_part(self, place: str) -> ImagePart:
        """Returns the image in a chat's form; `place` is the name of this source."""
        return image_part(f"data:{self.media_type};base64,{self.data}", f"{place}.data")


class UrlSource(Body):
    type: Literal["url"]
    url: Text

    def chat_part(self, place: str) -> ImagePart:
        """Returns the image in a chat's form; `place` is the name of this source."""
        return image_part(self.url, f"{place}.url")


class FileSource(Body):
    type: Literal["file"]
    file_id: Name

    def chat_part(self, place: str) -> ImagePart:
        """Returns the image in a chat's form; `place` is the name of this source."""
        return file_part(self.file_id, f"{place}.file_id")


class ImageBlock(Body):
    type: Literal["image"]
    source: Annotated[EncodedSource | UrlSource | FileSource, Field(discriminator="type")]
    cache_control: CacheControl | None = None
    transformations: Annotated[Any, *only([], reason="images are read as they are")] = None


_Results = Annotated[
    Items[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]],
    Field(max_length=MAX_PARTS),
    *_OR_TEXT,
]


class ThinkingBlock(Body):
    """`signature` has the reasoning if the client asked to leave `thinking` out."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: Name
    name: Name = Field(min_length=1)
    input: FreeObject
    caller: FreeObject | None = None
    toolset_name: Annotated[Any, *only(reason=_NO_TOOLSETS)] = None
    cache_control: CacheControl | None = None


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: _Results = Field(default_factory=list)
    is_error: StrictBool | None = None
    toolset_name: Annotated[Any, *only(reason=_NO_TOOLSETS)] = None
    cache_control: CacheControl | None = None


Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class MessageParam(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Items[Block], Field(max_length=MAX_PARTS), *_OR_TEXT]
    clear_at: Annotated[Any, *only("never", reason="leave the message out when it is over")] = None
    output_config: Annotated[Any, *only({}, reason="it is the same for a whole answer")] = None


class ToolParam(Body):
    """A tool. Inputs are always streamed while they are written; `eager_input_streaming` has no
    effect."""

    type: Annotated[Literal["custom"] | None, nothing_but("custom", NO_SERVER_TOOLS)] = None
    name: FunctionName
    description: Text | None = None
    input_schema: FreeObject
    input_examples: Items[FreeObject] | None = Field(None, max_length=MAX_EXAMPLES)
    strict: StrictBool | None = None
    eager_input_streaming: StrictBool | None = None
    defer_loading: Annotated[Any, *only(False, reason=NO_TOOL_SEARCH)] = None
    allowed_callers: Annotated[Any, *only(["direct"], reason=NO_SERVER_TOOLS)] = None
    cache_control: CacheControl | None = None

    @property
    def schema_shown(self) -> dict[str, Any]:
        """Returns the input's schema, with the examples in JSON Schema's form."""
        if not self.input_examples:
            return self.input_schema
        return {**self.input_schema, "examples": self.input_examples}


class ToolChoiceParam(Body):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: StrictBool = False


class NamedToolChoice(Body):
    type: Literal["tool"]
    name: FunctionName
    disable_parallel_tool_use: StrictBool = False


class ThinkingOff(Body):
    type: Literal["disabled"]


class ThinkingOn(Body):
    """Reasoning is on, and ends after `budget_tokens` at the latest.

    `block_binding` has no effect: thinking that is sent back is not checked.
    """

    type: Literal["enabled", "adaptive"]
    budget_tokens: StrictInt | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None
    block_binding: FreeObject | None = None


class Metadata(Body):
    user_id: Name | None = None


class JsonOutput(Body):
    type: Literal["json_schema"]
    schema_: FreeObject = Field(alias="schema")


class OutputConfig(Body):
    format: JsonOutput | None = None
    effort: Name | None = None
    task_budget: Annotated[Any, *only(reason="limit the answer with max_tokens")] = None


class ContextEdit(Body):
    """Accepted without effect: the chat template decides which earlier reasoning a model sees."""

    type: Annotated[Literal["clear_thinking_20251015"], nothing_but(CLEAR_THINKING, _NO_EDITS)]
    keep: Any = None


class ContextManagement(Body):
    edits: Items[ContextEdit] | None = Field(None, max_length=MAX_EDITS)


class _Conversation(GenerationBody):
    messages: Items[MessageParam] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: _Texts = Field(default_factory=list)
    tools: Items[ToolParam] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: (
        Annotated[ToolChoiceParam | NamedToolChoice, Field(discriminator="type")] | None
    ) = None
    thinking: Annotated[ThinkingOff | ThinkingOn, Field(discriminator="type")] | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: FreeObject | None = None


class CountTokensRequest(_Conversation):
    """The fields of a request that make its prompt."""


class MessagesRequest(_Conversation):
    """Anthropic's fields, then ours."""

    max_tokens: StrictInt = Field(ge=1, lt=2**31)
    temperature: _Number | None = None
    top_p: _Number | None = None
    top_k: StrictInt | None = None
    stop_sequences: Items[Text] | None = Field(None, max_length=MAX_STOP_STRINGS)
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] = "auto"

    min_p: _Number | None = None
    seed: StrictInt | None = None


NOT_IN_MESSAGES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    **UNSUPPORTED,
    "container": ((), "this server runs no tools itself"),
    "mcp_servers": (([],), "this server runs no tools itself"),
    "billing_policy": ((), LEAVE_OUT),
    "compaction": ((), "shorten the messages yourself"),
    "diagnostics": ((), "usage says how much of the prompt was cached"),
    "fallback_credit_token": ((), LEAVE_OUT),
    "fallbacks": (([],), "ask the other model when this one fails"),
    "inference_geo": ((), LEAVE_OUT),
    "thread": ((), "send the whole conversation"),
    "user_profile_id": ((), "name the user in metadata.user_id"),
    "workspace_id": ((), "an API key has one tenant, and needs no other name"),
    "speed": (("standard",), "use priority"),
    "stop": ((), "use stop_sequences"),
    "n": ((1,), "use /v1/chat/completions"),
}
