"""Checks request bodies of the OpenAI API. Responses are plain dicts, made elsewhere.

Unsupported fields are refused by name, with a remedy, unless they hold the value that has no
effect; null is the same as absent. Nothing is ignored, unless the server is set to ignore unknown
fields.
"""

from codecs import BOM_UTF8
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, Field, StrictBool, StrictInt, ValidationError

from headrace_common.images.layout import MAX_FPS, MIN_FPS
from headrace_common.sampling.params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingError,
    SamplingParams,
)

from .. import errors
from ..errors import from_validation, invalid
from ..limits.budget import Budget
from ..limits.fields import FreeObject, Items, Name, Text
from ..limits.json_shape import check_members, check_shape
from .chat_messages import MAX_TOOLS, Body, Message, Off, Tool, ToolChoice
from .structured_fields import StructuredBody

MAX_MESSAGES = 4096
# The most kinds of tools that a lenient server leaves out of one request.
MAX_KINDS_LEFT_OUT = 16
MAX_CACHE_SALT_CHARS = 1024
MAX_METADATA = 16
# The text of a token may have a hundred characters.
MAX_DETOKENIZED = 2**18

_BUDGET = Budget()

BodyType = TypeVar("BodyType", bound=BaseModel)
Refused = Mapping[str, tuple[tuple[Any, ...], str]]
_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
# -1 means no limit in vLLM.
ThinkingTokens = Annotated[StrictInt, Field(ge=-1, lt=2**31)]
Verbosity = Literal["low", "medium", "high"]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(strict=True, max_length=512)]],
    Field(max_length=MAX_METADATA),
]


class PromptCacheBody(Body):
    """OpenAI's fields on caching. They have no effect: prompts are cached by their content."""

    prompt_cache_key: Name | None = None
    prompt_cache_options: FreeObject | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None


class VideoIo(Body):
    """`fps`: how many frames of a video there are in a second of it."""

    fps: Annotated[_Number, Field(ge=MIN_FPS, le=MAX_FPS)] = 1.0


class MediaIo(Body):
    video: VideoIo = VideoIo()


class MediaBody(Body):
    """vLLM's field on how videos are read."""

    media_io_kwargs: MediaIo = MediaIo()


class StreamOptions(Body):
    """`continuous_usage_stats` is vLLM's: each chunk has the usage so far."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False
    include_obfuscation: Off = False


class GenerationBody(Body):
    """The fields that all requests share that generate text."""

    model: Name | None = None
    stream: StrictBool = False
    background: StrictBool = False
    priority: StrictInt = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: Text | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT_CHARS)


class SamplingBody(GenerationBody, StructuredBody):
    """The fields that chat and completions share: OpenAI's fields, then vLLM's."""

    stream_options: StreamOptions | None = None
    n: StrictInt | None = None
    temperature: _Number | None = None
    top_p: _Number | None = None
    presence_penalty: _Number | None = None
    frequency_penalty: _Number | None = None
    logit_bias: dict[str, _Number] | None = Field(None, max_length=MAX_LOGIT_BIAS)
    seed: StrictInt | None = None
    stop: Text | Annotated[Items[Text], Field(max_length=MAX_STOP_STRINGS)] | None = None
    user: Name | None = None
    safety_identifier: Name | None = None

    top_k: StrictInt | None = None
    min_p: _Number | None = None
    repetition_penalty: _Number | None = None
    stop_token_ids: Items[StrictInt] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: StrictBool | None = None
    min_tokens: StrictInt | None = None
    include_stop_str_in_output: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    allowed_token_ids: Items[StrictInt] | None = Field(None, max_length=MAX_ALLOWED_TOKEN_IDS)
    bad_words: Items[Text] | None = Field(None, max_length=MAX_BAD_WORDS)
    prompt_logprobs: StrictInt | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: StrictInt | None = None
    use_beam_search: StrictBool | None = None
    length_penalty: _Number | None = None
    early_stopping: Any = Field(None, json_schema_extra={"enum": [True, False, "never"]})
    return_token_ids: StrictBool = False

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling(self, **more: Any) -> SamplingParams:
        """Returns the sampling. Raises SamplingError for a wrong value, ApiError if fields
        conflict."""
        names = (
            "n temperature top_p presence_penalty frequency_penalty seed top_k min_p "
            "repetition_penalty stop_token_ids ignore_eos min_tokens stop "
            "include_stop_str_in_output skip_special_tokens allowed_token_ids bad_words "
            "best_of use_beam_search length_penalty early_stopping"
        ).split()
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.logit_bias is not None:
            given["logit_bias"] = {_token_id(key): value for key, value in self.logit_bias.items()}
        sampling = SamplingParams(**{**given, "structured_outputs": self.structured(), **more})
        if self.stream and sampling.answers_at_end:
            name = "use_beam_search" if sampling.use_beam_search else "best_of"
            raise invalid(f"{name} cannot be streamed. Leave stream out.", param="stream")
        return sampling


class ChatRequest(SamplingBody, PromptCacheBody, MediaBody):
    """A chat's body. `metadata` and `prediction` have no effect."""

    messages: Items[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: StrictInt | None = None
    max_completion_tokens: StrictInt | None = Field(None, ge=1, lt=2**31)
    logprobs: StrictBool = False
    top_logprobs: StrictInt | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    add_special_tokens: StrictBool = False
    chat_template_kwargs: FreeObject | None = None
    reasoning_effort: Name | None = None
    thinking_token_budget: ThinkingTokens | None = None
    verbosity: Verbosity | None = None
    metadata: Metadata | None = None
    prediction: FreeObject | None = None
    tools: Items[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: StrictBool = True


class CompletionRequest(SamplingBody):
    """A completion's body. `prompt` is text, token ids, or a list of either; it is checked when
    read."""

    prompt: Any
    max_tokens: StrictInt | None = None
    logprobs: StrictInt | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: StrictBool = True
    echo: StrictBool = False


class TokenizeRequest(MediaBody):
    """vLLM's body: a prompt, or messages for the chat template."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Items[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: StrictBool | None = None
    return_token_strs: StrictBool = False
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    chat_template_kwargs: FreeObject | None = None
    tools: Items[Tool] | None = Field(None, max_length=MAX_TOOLS)


class DetokenizeRequest(Body):
    model: Name | None = None
    tokens: Items[Annotated[int, Field(strict=True, ge=0, lt=2**31)]] = Field(
        max_length=MAX_DETOKENIZED
    )


_NO_TOOLS = "tools are called in chats only"
_NO_FUNCTIONS = "use tools and tool_choice"
_NO_BEAMS = "ask /v1/completions or /v1/chat/completions for that"
_NO_TEMPLATE = "templates come from the server's model; pass variables in chat_template_kwargs"
_NO_AUDIO = "this server answers with text only"
_NO_STORE = "this server keeps nothing"
_CACHED = "prompts are cached by content, for as long as the cache holds them"
LEAVE_OUT = "leave it out"

# field -> (values that have no effect, remedy)
UNSUPPORTED: Refused = {
    "tools": (([],), _NO_TOOLS),
    "tool_choice": (("none", "auto"), _NO_TOOLS),
    "parallel_tool_calls": ((True, False), _NO_TOOLS),
    "functions": (([],), _NO_FUNCTIONS),
    "function_call": (("none", "auto"), _NO_FUNCTIONS),
    "structural_tag": ((), LEAVE_OUT),
    "guided_decoding_backend": ((), LEAVE_OUT),
    "guided_whitespace_pattern": ((), LEAVE_OUT),
    "chat_template": ((), _NO_TEMPLATE),
    "documents": (([],), "put the documents into a message"),
    "modalities": ((["text"],), _NO_AUDIO),
    "audio": ((), _NO_AUDIO),
    "reasoning_effort": ((), "models reason in chats only"),
    "verbosity": ((), "chat templates read it, which completions have none of"),
    "web_search_options": ((), LEAVE_OUT),
    "service_tier": (("auto", "default"), "use priority"),
    "store": ((False,), _NO_STORE),
    "metadata": (({},), _NO_STORE),
    "moderation": ((), "moderate where you are"),
    "prompt_cache_key": ((), "prompts are cached by content; use cache_salt to part callers"),
    "prompt_cache_options": ((), _CACHED),
    "prompt_cache_retention": ((), _CACHED),
    "echo": ((False,), "chats have no text to repeat"),
    "suffix": (("",), "this server does not fill in the middle"),
    "best_of": ((1,), _NO_BEAMS),
    "use_beam_search": ((False,), _NO_BEAMS),
    "length_penalty": ((1, 1.0), _NO_BEAMS),
    "early_stopping": ((False,), _NO_BEAMS),
    "truncate_prompt_tokens": ((), "shorten the prompt yourself"),
    "spaces_between_special_tokens": ((True,), LEAVE_OUT),
    "return_tokens_as_token_ids": ((False,), "use return_token_ids"),
    "request_id": ((), "send it in the header X-Request-Id"),
    "include_reasoning": ((True,), "the answer has it, where the model reasons"),
    "thinking_token_budget": ((), "models reason in chats only"),
    "repetition_detection": ((), "use repetition_penalty"),
    "logits_processors": ((), "code of clients is not run"),
    "vllm_xargs": (({},), LEAVE_OUT),
    "kv_transfer_params": (({},), LEAVE_OUT),
    "prompt_embeds": ((), "send text or token ids"),
    "mm_processor_kwargs": (({},), "images are read as preprocessor_config.json says"),
    "media_io_kwargs": (({},), "send media in a chat"),
}


def parse(
    kind: type[BodyType],
    raw: bytes,
    unsupported: Refused = UNSUPPORTED,
    *,
    lenient: bool = False,
) -> BodyType:
    """Parses and checks a body, as `checked` does. Raises ApiError, which names the field."""
    content = _load_json(raw)
    fields = {name: value for name, value in content.items() if value is not None}
    for name in unsupported.keys() & fields.keys() - kind.model_fields.keys():
        neutral, remedy = unsupported[name]
        if fields[name] not in neutral:
            raise invalid(
                f"{name} is not supported: {remedy}.", param=name, code="unsupported_parameter"
            )
        del fields[name]
    return checked(kind, fields, lenient=lenient)


def checked(
    kind: type[BodyType], fields: dict[str, Any], *, lenient: bool = False, place: str = ""
) -> BodyType:
    """Checks an object of a body; `place` is where in it. Raises ApiError, which names the field.

    `lenient`: unknown fields, and tools of some other kinds, are left out instead of refused.
    """
    for _ in range(MAX_KINDS_LEFT_OUT if lenient else 0):
        try:
            return kind.model_validate(fields, extra="ignore")
        except ValidationError as error:
            others = _other_tools(fields, error)
            if others is None:
                raise from_validation(error, place) from error
            fields = {**fields, "tools": others}
    try:
        return kind.model_validate(fields, extra="ignore" if lenient else None)
    except ValidationError as error:
        raise from_validation(error, place) from error


def _other_tools(fields: Mapping[str, Any], error: ValidationError) -> list[Any] | None:
    """Returns the tools without those of the refused kind; None if that is not the fault."""
    for fault in error.errors(include_url=False, include_input=False):
        match fault["type"], fault["loc"]:
            case errors.UNSUPPORTED_KIND, ("tools", int(at), "type"):
                refused = fields["tools"][at]["type"]
                return [tool for tool in fields["tools"] if _kind_of(tool) != refused]
    return None


def _kind_of(tool: object) -> object:
    return tool.get("type") if isinstance(tool, dict) else None


def thinking_limit(tokens: int | None) -> int | None:
    """Returns the most tokens of reasoning; None if there is no limit."""
    return None if tokens == -1 else tokens


def check_prompt_logprobs(body: SamplingBody) -> None:
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs are not for stream: true.", param="prompt_logprobs")


def check_stream_options(body: SamplingBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options is only for stream: true.", param="stream_options")


def _load_json(raw: bytes) -> dict[str, Any]:
    check_shape(raw, _BUDGET)
    try:
        content = pydantic_core.from_json(raw.removeprefix(BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"The body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(content, dict):
        raise invalid("The body must be a JSON object.", code="invalid_json")
    check_members(content, raw, _BUDGET)
    return content


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise SamplingError("logit_bias", f"keys are token ids, not {key!r:.40}")
    return int(key)
