"""What both backends make of a request when it is admitted."""

import hashlib

from ..messages import GenerateRequest, pack_tokens


def priority_class(priority: int) -> int:
    """Which queue a request's priority means: 1 sooner, 2 normal, 3 later."""
    return 2 + (priority > 0) - (priority < 0)


def token_cost(request: GenerateRequest) -> int:
    """Prompt plus maximal output tokens; output without a bound counts nothing."""
    output = request.sampling.n * (request.sampling.max_tokens or 0)
    return len(request.prompt_token_ids) + output


def fingerprint(request: GenerateRequest) -> bytes:
    """Tells another request under the same id: what is asked, not when or with which seed."""
    sampling = request.sampling
    asked = (
        request.model,
        request.tenant,
        request.cache_salt,
        sampling.n,
        sampling.temperature,
        sampling.max_tokens,
    )
    digest = hashlib.sha256(repr(asked).encode())
    digest.update(pack_tokens(request.prompt_token_ids))
    return digest.digest()[:16]
