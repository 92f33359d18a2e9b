"""Events of streamed answers, as the OpenAPI document describes them: the JSON of each `data` line.

Events are made as plain dicts, and none is checked against these types while it is served.
"""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from .answers import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    FinishReason,
    MessageObject,
    MessageText,
    MessageThinking,
    MessageToolUse,
    MessageUsage,
    OutputFunctionCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponseObject,
    Usage,
)

# Chats and completions


class FunctionDelta(TypedDict):
    """The first piece of a call has its function's name."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """The first piece of a call has its id and type."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(TypedDict):
    """What a choice's message has more than before. `reasoning` is the same as
    `reasoning_content`."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]


class ChatCompletionChunk(TypedDict):
    """The last chunk with usage, if it was asked for, has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]


class CompletionChunkChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class CompletionChunk(TypedDict):
    """The last chunk with usage, if it was asked for, has no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChunkChoice]
    usage: NotRequired[Usage | None]


# Responses


class ResponseEvent(TypedDict):
    """`type` says which of the other fields an event has."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: NotRequired[ResponseObject]
    output_index: NotRequired[int]
    item_id: NotRequired[str]
    item: NotRequired[OutputMessage | OutputReasoning | OutputFunctionCall]
    content_index: NotRequired[int]
    part: NotRequired[OutputText | ReasoningText]
    delta: NotRequired[str]
    text: NotRequired[str]
    logprobs: NotRequired[list[ChatLogprob]]
    name: NotRequired[str]
    arguments: NotRequired[str]


# Messages


class MessageStart(TypedDict):
    type: Literal["message_start"]
    message: MessageObject


class BlockStart(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: MessageText | MessageThinking | MessageToolUse


class TextDelta(TypedDict):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(TypedDict):
    type: Literal["signature_delta"]
    signature: str


class InputDelta(TypedDict):
    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(TypedDict):
    type: Literal["content_block_stop"]
    index: int


class MessageEnding(TypedDict):
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None


class MessageDelta(TypedDict):
    type: Literal["message_delta"]
    delta: MessageEnding
    usage: MessageUsage


class MessageStop(TypedDict):
    type: Literal["message_stop"]


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
STREAMS: dict[str, Any] = {
    "/v1/chat/completions": ChatCompletionChunk,
    "/v1/completions": CompletionChunk,
    "/v1/responses": ResponseEvent,
    "/v1/responses/{response_id}": ResponseEvent,
    "/v1/messages": MessageEvent,
}
