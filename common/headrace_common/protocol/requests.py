"""Values that both queues, in Redis and in memory, compute when a request is admitted: its priority
class, its cost in tokens, its fingerprint, and the Retry-After of a refusal."""

import hashlib

from ..errors import MessageError, QueueFull
from ..wire.keys import shard_of
from ..wire.messages import GenerateRequest, pack_tokens

UNKNOWN_RATE_S = 5.0  # after which a refused request may be sent again


def priority_class(priority: int) -> int:
    """The queue for a request's priority: 1 sooner, 2 normal, 3 later."""
    return 2 + (priority > 0) - (priority < 0)


def token_cost(request: GenerateRequest) -> int:
    """Prompt plus maximal output tokens; unbounded output counts as 0."""
    output = request.sampling.branches * (request.sampling.max_tokens or 0)
    return len(request.prompt_token_ids) + output


def queue_full(
    request: GenerateRequest, waiting: int, rate: float, *, tenant: bool = False
) -> QueueFull:
    """The error for a full queue of `waiting` requests, of all tenants or of one.

    At `rate` ended requests per second, the client should retry when a tenth of them has ended.
    """
    retry_after = min(60.0, max(1.0, waiting / 10 / rate)) if rate > 0 else UNKNOWN_RATE_S
    whose = "of this tenant " if tenant else ""
    message = f"{waiting} requests {whose}wait for {request.model}; try again later"
    return QueueFull(message, retry_after=retry_after, tenant=tenant)


def check_shard(request_id: str, shard: int) -> None:
    """Raises MessageError if a request is in another shard than its id says."""
    if shard_of(request_id) != shard:
        raise MessageError(f"the request's id is not one of shard {shard}")


def fingerprint(request: GenerateRequest) -> bytes:
    """A digest of what a request asks, without times and seed.

    It detects a different request under the same id.
    """
    sampling = request.sampling
    asked = (
        request.model,
        request.tenant,
        request.cache_salt,
        sampling.n,
        sampling.temperature,
        sampling.max_tokens,
        *(() if request.pooling is None else (request.pooling,)),
        *(() if request.lora is None else (request.lora,)),
        *((sampling.branches, sampling.use_beam_search) if sampling.answers_at_end else ()),
        *((request.images,) if request.images else ()),
    )
    digest = hashlib.sha256(repr(asked).encode())
    digest.update(pack_tokens(request.prompt_token_ids))
    return digest.digest()[:16]
