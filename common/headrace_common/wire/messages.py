"""Messages on the wire: their fields, and how they are packed and unpacked.

msgpack with a version and a schema check; token ids travel as packed little-endian uint32. Decoding
never runs code, never trusts a length, ignores unknown fields and refuses unknown versions.
"""

import re
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgpack

from ..errors import FailureCode, MessageError
from ..sampling.params import SamplingError, SamplingParams
from ..sampling.pooling import PoolingParams
from ..sampling.thinking import ThinkingFormat
from ..structured.structured import StructuredOutputsParams
from .images import ImageSpan, pack_images, unpack_images

PROTOCOL_VERSION = 1
# The versions of requests with `lora_version` and with `images`: engines that know only an earlier
# version leave them to others.
ADAPTER_VERSION = 2
IMAGE_VERSION = 3
# The newest version of requests that this version reads.
REQUEST_VERSION = IMAGE_VERSION
MAX_MESSAGE_BYTES = 16 * 2**20
MAX_PROMPT_TOKENS = 2**21
MAX_ID_CHARS = 256
MAX_TRACE_CHARS = 1024

_VERSION = re.compile(r"[0-9a-f]{32}")
_EMPTY: Mapping[str, str] = MappingProxyType({})


class UnknownVersion(MessageError):
    """The message is of a newer protocol; another consumer may understand it."""

    code = "message_version_unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One accepted request as gateways write it and engines read it.

    `sampling.seed` is always set; `sampling.stop` is always empty, because the gateway matches stop
    strings. Times are Unix milliseconds. `priority` 0 is normal, lower is sooner. `trace` carries
    W3C `traceparent` and `tracestate`. `keep_ms`: how long its outcome can be read after its end
    (0: only as long as its gateway may need it). `window_ms`: how long it continues while no
    gateway follows it, if that is longer than the engine's own limit. With `pooling` it ends with
    the prompt's embedding; an engine that does not know that field generates `max_tokens` tokens
    instead. `lora` names the adapter to run with; an engine that does not know that field runs the
    model without one. `lora_version` is set if that adapter was loaded while engines served: only
    engines that have loaded this version of it may run the request. `tenant_weight` is the
    tenant's share relative to those of other tenants. `key` is the id of the client's API key;
    engines do not need it. `images` are the images in the prompt, in order; the queue stores their
    bytes apart (EngineQueue.image). `variant` is the side of engines that runs it; it is in the
    request's record, not in the message.
    """

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    created_ms: int
    deadline_ms: int
    tenant: str = "default"
    cache_salt: bytes = b""
    priority: int = 0
    trace: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    keep_ms: int = 0
    window_ms: int = 0
    pooling: PoolingParams | None = None
    lora: str | None = None
    lora_version: str | None = None
    tenant_weight: float = 1.0
    key: str = ""
    images: tuple[ImageSpan, ...] = ()
    variant: str = field(default="", compare=False)

    @property
    def served_model(self) -> str:
        """The name that the client asked for."""
        return self.lora or self.model

    @property
    def adapter(self) -> str | None:
        """What tells the request's adapter from all others, and from other versions of itself."""
        if self.lora is None or self.lora_version is None:
            return self.lora
        return adapter_key(self.lora, self.lora_version)


def version_of(request: GenerateRequest) -> int:
    """The protocol version that an engine must know to run a request."""
    if request.images:
        return IMAGE_VERSION
    return PROTOCOL_VERSION if request.lora_version is None else ADAPTER_VERSION


def required_adapter(request: GenerateRequest) -> str:
    """The adapter that a request's engine must have loaded while it served; "" if there is none."""
    return "" if request.lora is None or request.lora_version is None else request.adapter or ""


def adapter_key(name: str, version: str) -> str:
    """The key of one version of an adapter: KV is cached under it."""
    return f"{name}@{version}"


def adapter_name(key: str) -> str:
    """The name that clients use of an adapter with this key, or with this name."""
    name, _, version = key.rpartition("@")
    return name if name and _VERSION.fullmatch(version) else key


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of one position: the chosen token's, its rank (1: most likely), and the
    top."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class Tokens(NamedTuple):
    """New tokens of one choice. `index` is the output position of the first of them.

    `finish_reason` is `stop` or `length` on the choice's last message; `stop_token` is the id of
    the stop token that ended it (None: the end-of-sequence token). `embedding` (little-endian
    float32) is the whole answer if the request asked for one. `prompt_logprobs` (packed) come with
    a request's first tokens, and so does `took_ms`: for how long its engine had the request then.
    `round` is that of the Takeover before the run that made the tokens; 0 if there was none.
    A tuple, because one is made for every token.
    """

    request_id: str
    attempt: int
    choice: int
    index: int  # type: ignore[assignment]  # its name on the wire; `tuple.index` is not used
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] | None = None
    finish_reason: str | None = None
    stop_token: int | None = None
    cached_tokens: int = 0
    embedding: bytes | None = None
    prompt_logprobs: bytes | None = None
    took_ms: int | None = None
    round: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceState:
    """The known output of one choice.

    `logprobs` has one entry for each token; it is None if none were requested, or if those of some
    tokens are unknown. `embedding` is as in Tokens.
    """

    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_token: int | None = None
    logprobs: tuple[Logprobs, ...] | None = None
    embedding: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Takeover:
    """An engine took the request over and asks its gateway which tokens the client has.

    `round` counts this engine's questions, so that a late answer to an earlier one is recognised.
    Until the answer comes, the engine sends no tokens of the request. With `rounds_in_tokens` its
    tokens name their round; those of an engine of version 0.1.0 do not.
    """

    request_id: str
    attempt: int
    round: int = 1
    rounds_in_tokens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """The full output so far, for a gateway that has just taken the client over."""

    request_id: str
    attempt: int
    choices: tuple[ChoiceState, ...]
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The request ended without (the rest of) an answer."""

    request_id: str
    attempt: int
    failure: FailureCode
    message: str


Reply = Tokens | Takeover | Sync | Failed


@dataclass(frozen=True, slots=True)
class Frame:
    """All replies of one engine to one gateway after one step.

    `model` is not sent. It is the model whose engines may write to the stream in which the frame
    was found; "" if all may.
    """

    engine_id: str
    replies: tuple[Reply, ...]
    model: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """No client wants the request's answer any more."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopChoice:
    """The gateway matched a stop string: this choice is complete."""

    request_id: str
    choice: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Answer to Takeover: the client has exactly these tokens.

    `round` is that of the question. Round 0 answers no question: the engine's history is not the
    client's, so it must stop and ask (Takeover). An engine ignores all other rounds but its last.
    """

    request_id: str
    attempt: int
    choices: tuple[ChoiceState, ...]
    round: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resend:
    """The gateway found a gap: send this choice's tokens again from `index`."""

    request_id: str
    choice: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reroute:
    """Another gateway has the client now: send a Sync there and all later replies."""

    request_id: str
    gateway_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Disown:
    """The gateway does not know the request, or a newer engine owns it: drop it."""

    request_id: str
    attempt: int
    superseded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Take no more work and finish what runs; then exit, or wait for SIGTERM or Recall.

    `within_ms` is set if the engine's node ends then. An engine whose drain may take longer gives
    back what runs at once; one of an older version finishes it.
    """

    within_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Take work again after Drain. An engine that received SIGTERM ignores it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """A console shows the engine: write snapshots of the batch for this long, in milliseconds."""

    duration_ms: int


Control = Cancel | StopChoice | Resume | Resend | Reroute | Disown | Drain | Recall | Watch


def encode_request(request: GenerateRequest) -> bytes:
    """Packs a request. Raises MessageError if it exceeds the size limit."""
    sampling = request.sampling
    body = {
        "v": version_of(request),
        "id": request.request_id,
        "model": request.model,
        "prompt": pack_tokens(request.prompt_token_ids),
        "sampling": {
            name: value
            for name in _SAMPLING_FIELDS
            if (value := getattr(sampling, name)) is not None or name not in _LEFT_OUT
        },
        "created": request.created_ms,
        "deadline": request.deadline_ms,
        "tenant": request.tenant,
        "salt": request.cache_salt,
        "priority": request.priority,
        "trace": request.trace,
        "keep": request.keep_ms,
        "window": request.window_ms,
    }
    if request.pooling is not None:
        body["pooling"] = {"dimensions": request.pooling.dimensions}
    if request.lora is not None:
        body["lora"] = request.lora
    if request.lora_version is not None:
        body["lora_version"] = request.lora_version
    if request.tenant_weight != 1:
        body["weight"] = float(request.tenant_weight)
    if request.key:
        body["key"] = request.key
    if request.images:
        body["images"] = pack_images(request.images)
    return pack_message(body, other=_plain)


def decode_request(data: bytes) -> GenerateRequest:
    """Unpacks and checks a request. Raises MessageError (UnknownVersion for a newer protocol)."""
    body = _unpack_map(data)
    version = body.get("v")
    if type(version) is not int or not PROTOCOL_VERSION <= version <= REQUEST_VERSION:
        raise UnknownVersion(f"protocol version {version!r:.40} is not {PROTOCOL_VERSION}")
    prompt = unpack_tokens(_get(body, "prompt", bytes))
    if not 0 < len(prompt) <= MAX_PROMPT_TOKENS:
        raise MessageError(
            f"prompt: {len(prompt)} tokens are not between 1 and {MAX_PROMPT_TOKENS}"
        )
    return GenerateRequest(
        request_id=_identifier(body, "id"),
        model=_identifier(body, "model"),
        prompt_token_ids=prompt,
        sampling=_sampling(_get(body, "sampling", dict)),
        created_ms=_get(body, "created", int),
        deadline_ms=_get(body, "deadline", int),
        tenant=_identifier(body, "tenant"),
        cache_salt=_get(body, "salt", bytes),
        priority=_get(body, "priority", int),
        trace=_trace(_get(body, "trace", dict)),
        keep_ms=_get({"keep": 0, **body}, "keep", int),
        window_ms=_get({"window": 0, **body}, "window", int),
        pooling=_pooling(_get(body, "pooling", dict)) if "pooling" in body else None,
        lora=_identifier(body, "lora") if "lora" in body else None,
        lora_version=_version(body) if "lora_version" in body else None,
        tenant_weight=_weight(body),
        key=_identifier(body, "key") if "key" in body else "",
        images=unpack_images(body.get("images", []), len(prompt)),
    )


def _version(body: dict[str, Any]) -> str:
    version = _identifier(body, "lora_version")
    if _VERSION.fullmatch(version) is None or "lora" not in body:
        raise MessageError("lora_version: must be 32 hexadecimal digits, with lora")
    return version


def _weight(body: dict[Any, Any]) -> float:
    weight = _get({"weight": 1.0, **body}, "weight", float)
    if not 0 < weight < float("inf"):
        raise MessageError(f"weight: {weight} is not above 0")
    return weight


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """Inverse of pack_tokens. Raises MessageError if the length is not a multiple of 4."""
    if len(data) % 4:
        raise MessageError(f"token ids: {len(data)} bytes are not a multiple of 4")
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)


def _plain(value: object) -> object:
    """Converts a value of a request that msgpack does not know to one that it knows."""
    if isinstance(value, StructuredOutputsParams | ThinkingFormat):
        return value.to_wire()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a request has no {type(value).__name__}")


def pack_message(body: object, other: Callable[[object], object] | None = None) -> bytes:
    """Packs with msgpack; `other` converts values that it does not know.

    Raises MessageError beyond MAX_MESSAGE_BYTES.
    """
    data: bytes = msgpack.packb(body, use_bin_type=True, default=other)
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"message of {len(data)} bytes is over {MAX_MESSAGE_BYTES}")
    return data


def _unpack(data: bytes) -> Any:
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"message of {len(data)} bytes is over {MAX_MESSAGE_BYTES}")
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,
            ext_hook=_refuse_extension,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MessageError(f"not msgpack: {error}") from error


def _refuse_extension(code: int, _data: bytes) -> object:
    raise MessageError(f"msgpack extension type {code} is not allowed")


def _unpack_map(data: bytes) -> dict[Any, Any]:
    body = _unpack(data)
    if not isinstance(body, dict):
        raise MessageError(f"a message is a map, not {type(body).__name__}")
    return body


T = TypeVar("T")


def _get(body: dict[Any, Any], name: str, kind: type[T]) -> T:
    value = body.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise MessageError(f"{name}: must be {kind.__name__}, not {type(value).__name__}")
    return value


def _identifier(body: dict[Any, Any], name: str) -> str:
    value: str = _get(body, name, str)
    if not 0 < len(value) <= MAX_ID_CHARS:
        raise MessageError(f"{name}: must have 1 to {MAX_ID_CHARS} characters")
    return value


def _trace(raw: dict[Any, Any]) -> Mapping[str, str]:
    for key, value in raw.items():
        if not isinstance(key, str) or not isinstance(value, str) or len(value) > MAX_TRACE_CHARS:
            raise MessageError("trace: must map words to short strings")
    return MappingProxyType(raw)


def _pooling(raw: dict[Any, Any]) -> PoolingParams:
    dimensions = raw.get("dimensions")
    try:
        return PoolingParams(dimensions=dimensions)
    except SamplingError as error:
        raise MessageError(f"pooling: {error}") from error


# Fields for texts that only gateways use.
_NOT_SENT = frozenset({"stop", "bad_words"})
# Fields that are left out if they are None: a stored request keeps its bytes.
_LEFT_OUT = frozenset({"thinking_token_budget", "thinking_format"})
_SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams) if f.name not in _NOT_SENT)


def _sampling(raw: dict[Any, Any]) -> SamplingParams:
    known: dict[str, Any] = {
        name: tuple(raw[name]) if isinstance(raw[name], list) else raw[name]
        for name in _SAMPLING_FIELDS
        if name in raw
    }
    try:
        if known.get("structured_outputs") is not None:
            known["structured_outputs"] = StructuredOutputsParams.from_wire(
                raw["structured_outputs"]
            )
        if known.get("thinking_format") is not None:
            known["thinking_format"] = ThinkingFormat.from_wire(raw["thinking_format"])
        return SamplingParams(**known)
    except (SamplingError, TypeError) as error:
        raise MessageError(f"sampling: {error}") from error
