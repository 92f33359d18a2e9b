"""Bodies of answers, as the OpenAPI document describes them.

Answers are made as plain dicts, and no answer is checked against these types while it is served.
"""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

FinishReason = Literal["stop", "length", "tool_calls"]


class TokenDetails(TypedDict):
    cached_tokens: int


class ReasoningDetails(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    """Tokens of all prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[TokenDetails]
    completion_tokens_details: NotRequired[ReasoningDetails]


class PromptUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


# Chats and completions


class CalledFunction(TypedDict):
    """A function's name, and its arguments as the JSON that the model wrote."""

    name: str
    arguments: str


class ChatToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    """`reasoning` is the same as `reasoning_content`."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ChatToolCall]]


class TokenLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]


class PromptLogprob(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


# One entry for each token, by token id; the first token has none.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class CompletionLogprobs(TypedDict):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: Usage


# Responses


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatLogprob]


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(TypedDict):
    id: str
    type: Literal["reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: NotRequired[str]


class OutputFunctionCall(TypedDict):
    id: str
    type: Literal["function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str


class InputTokenDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: NotRequired[int]


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokenDetails
    output_tokens: int
    output_tokens_details: ReasoningDetails
    total_tokens: int


class ResponseFailure(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: str


class ResponseObject(TypedDict):
    """Beside these fields it repeats those of its request, such as `instructions` and `tools`."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputMessage | OutputReasoning | OutputFunctionCall]
    usage: ResponseUsage | None


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


# Messages


class MessageText(TypedDict):
    type: Literal["text"]
    text: str


class MessageThinking(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class MessageToolUse(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(TypedDict):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageObject(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageText | MessageThinking | MessageToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(TypedDict):
    input_tokens: int


# Vectors and scores


class Embedding(TypedDict):
    """`embedding` is a list of numbers, or with `encoding_format: base64` their float32 bytes. A
    model of late interaction makes a list for each token."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | list[list[float]] | str


class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PromptUsage


class Score(TypedDict):
    object: Literal["score"]
    index: int
    score: float


class ScoreList(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage


class RankedText(TypedDict):
    text: str


class RankedDocument(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[RankedText]


class Ranking(TypedDict):
    """The best documents first."""

    id: str
    model: str
    usage: PromptUsage
    results: list[RankedDocument]


# Tokens


class Tokenized(TypedDict):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str | None] | None


class Detokenized(TypedDict):
    prompt: str


class TokenizerInfo(TypedDict):
    """Further fields have the names of special tokens, such as `eos_token`."""

    chat_template: str | None


# Lists


class Page(TypedDict):
    """A part of a list: `after` with `last_id` gets the next one."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class File(TypedDict):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FilePage(Page):
    data: list[File]


class DeletedFile(TypedDict):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchErrors(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]


class BatchCounts(TypedDict):
    total: int
    completed: int
    failed: int


class BatchObject(TypedDict):
    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "in_progress",
        "finalizing",
        "completed",
        "failed",
        "expired",
        "cancelling",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: ResponseUsage | None
    metadata: dict[str, str] | None


class BatchPage(Page):
    data: list[BatchObject]


class InputItems(Page):
    """Items of a response's input, as they were sent."""

    data: list[dict[str, Any]]


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class Architecture(TypedDict):
    """What a model reads and writes."""

    input_modalities: list[Literal["text", "image", "video"]]


class Model(TypedDict):
    """`parent` is the base model of a LoRA adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str | None
    parent: str | None
    max_model_len: int | None
    architecture: Architecture


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class AnthropicModel(TypedDict):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: str
    max_input_tokens: int | None
    max_tokens: int | None


class AnthropicFile(TypedDict):
    type: Literal["file"]
    id: str
    filename: str
    mime_type: str
    size_bytes: int
    created_at: str
    expires_at: str
    downloadable: bool


class AnthropicFilePage(TypedDict):
    """A part of a list: `page` with `next_page` gets the next one."""

    data: list[AnthropicFile]
    next_page: str | None


class AnthropicDeletedFile(TypedDict):
    type: Literal["file_deleted"]
    id: str


class AnthropicModelList(TypedDict):
    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool


# Requests that outlive their connection, health


class RequestError(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class RequestObject(TypedDict):
    """`result` is the answer of the route that `operation` names, once it has completed."""

    id: str
    object: Literal["request"]
    operation: str
    model: str
    status: str
    background: bool
    created_at: int
    expires_at: int
    result: dict[str, Any] | None
    error: RequestError | None


class Health(TypedDict):
    status: Literal["ok"]
    warning: NotRequired[str]


class Version(TypedDict):
    version: str


class RecentRequests(TypedDict):
    """A tenant's last requests, the newest first; `time` is Redis' clock in Unix seconds."""

    time: float
    requests: list[dict[str, Any]]


class ConsoleLimits(TypedDict):
    """The most images of one request; bytes and pixels of one of them; bytes of a request's
    body."""

    images: int
    image_bytes: int
    image_pixels: int
    body_bytes: int


class KilledEngine(TypedDict):
    killed: str
