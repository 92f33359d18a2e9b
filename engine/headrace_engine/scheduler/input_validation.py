"""Checks, when a request is added, whether this engine can run it."""

from collections.abc import Container
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from headrace_common.sampling.params import SamplingError

from ..core.errors import RequestError
from ..core.images import ImageLimits
from ..core.kv_cache_groups import KVGroups
from ..core.pooler_config import PoolerConfig
from ..core.request import EngineRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the model and its KV cache. `max_model_len` counts prompt and output tokens.

    With `num_host_blocks` 0 nothing is swapped. `bytes_per_block` is for statistics. A model with
    `pooler` makes embeddings, others generate. `kv_groups` are the groups of its layers. `adapters`
    are the names of adapters that requests may use. `images` is None if the engine reads none.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    num_host_blocks: int = 0
    bytes_per_block: int = 0
    pooler: PoolerConfig | None = None
    kv_groups: KVGroups = KVGroups()
    adapters: Container[str] = ()
    images: ImageLimits | None = None

    @property
    def capacity(self) -> int:
        """The most token positions of one sequence that has the whole KV cache."""
        return self.kv_groups.capacity(self.num_blocks, self.block_size)

    @property
    def max_length(self) -> int:
        """The most tokens of one sequence: the context, or what the KV cache holds if less."""
        return min(self.max_model_len, self.capacity)


def check_request(request: EngineRequest, limits: Limits) -> None:
    """Raises RequestError, naming field, value and remedy, if the request can never run here."""
    _check_task(request, limits)
    _check_prompt(request, limits)
    _check_capacity(request, limits)
    _check_resume(request, limits)
    _check_tokenizer(request)
    _check_adapter(request, limits)
    _check_images(request, limits)
    try:
        request.params.check_vocabulary(limits.vocab_size)
    except SamplingError as error:
        raise RequestError(str(error)) from error


def _check_task(request: EngineRequest, limits: Limits) -> None:
    if request.pooling is None:
        if limits.pooler is not None:
            raise RequestError("this model makes embeddings, not text: use /v1/embeddings")
        return
    if limits.pooler is None:
        raise RequestError("this model makes text, not embeddings: use an engine with task embed")
    if request.params.n != 1:
        raise RequestError(f"n must be 1 for an embedding, not {request.params.n}")
    limits.pooler.check(request.pooling.dimensions)
    limits.pooler.check_prompt(len(request.prompt_token_ids))


def _check_tokenizer(request: EngineRequest) -> None:
    if request.params.structured_outputs is not None and request.grammar is None:
        raise RequestError(
            "structured_outputs need a tokenizer, and this engine has none: leave them out"
        )
    if request.params.thinking_token_budget is not None and request.thinking is None:
        raise RequestError(
            "thinking_token_budget needs a tokenizer, and this engine has none: leave it out"
        )


def _check_adapter(request: EngineRequest, limits: Limits) -> None:
    if request.lora is not None and request.lora not in limits.adapters:
        raise RequestError(
            f"lora {request.lora!r:.80} is not an adapter of this engine: name it in lora_modules"
        )


def _check_images(request: EngineRequest, limits: Limits) -> None:
    images = [image.span for image in request.images]
    if not images:
        return
    if limits.images is None:
        raise RequestError("this engine reads no images: send text only")
    if len(images) > limits.images.images:
        raise RequestError(
            f"the prompt has {len(images)} images, but limit_mm_per_prompt is "
            f"{limits.images.images}: send fewer"
        )
    if images[-1].end >= len(request.prompt_token_ids) and request.pooling is None:
        raise RequestError("the prompt ends with an image: send text after it")
    most = max(span.length for span in images)
    if most > limits.images.tokens:
        raise RequestError(
            f"an image has {most} tokens, but there is room for {limits.images.tokens}: send a "
            f"smaller image or raise {_room(limits.images)}"
        )


def _room(images: ImageLimits) -> str:
    both = " and max_num_batched_tokens" if images.whole else ""
    return f"encoder_cache_bytes{both}"


def _check_prompt(request: EngineRequest, limits: Limits) -> None:
    length = len(request.prompt_token_ids)
    if length == 0:
        raise RequestError("prompt_token_ids is empty: give at least one token")
    if request.pooling is not None:
        if length > limits.max_model_len:
            raise RequestError(
                f"prompt_token_ids has {length} tokens, but the context is {limits.max_model_len}: "
                "send at most that many"
            )
    elif length >= limits.max_model_len:
        raise RequestError(
            f"prompt_token_ids has {length} tokens, but the context of {limits.max_model_len} "
            f"must also hold an output token: send at most {limits.max_model_len - 1}"
        )
    _check_ids("prompt_token_ids", request.prompt_token_ids, limits.vocab_size)


def _check_capacity(request: EngineRequest, limits: Limits) -> None:
    """Refuses max_tokens that the KV cache cannot hold; without it the cache is the limit."""
    length, asked = len(request.prompt_token_ids), request.params.max_tokens
    wanted = min(length + (1 if asked is None else asked), limits.max_model_len)
    if wanted > limits.capacity:
        raise RequestError(
            f"prompt_token_ids and max_tokens come to {wanted} tokens, but the whole KV cache "
            f"holds {limits.capacity}: ask for less or give the engine more KV memory"
        )


def _check_resume(request: EngineRequest, limits: Limits) -> None:
    params, length = request.params, len(request.prompt_token_ids)
    if not request.resume:
        return
    if len(request.resume) != params.n:
        raise RequestError(f"resume has {len(request.resume)} choices, but n is {params.n}")
    room = limits.max_length - length
    room = room if params.max_tokens is None else min(room, params.max_tokens)
    for choice, tokens in enumerate(request.resume):
        if len(tokens) > room:
            raise RequestError(
                f"resume[{choice}] has {len(tokens)} tokens, but the request may have {room}"
            )
        if tokens:
            _check_ids(f"resume[{choice}]", tokens, limits.vocab_size)


def _check_ids(name: str, ids: Tokens[int], vocab_size: int) -> None:
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{name} has token id {token}, but the model knows 0 to {vocab_size - 1}"
            )
