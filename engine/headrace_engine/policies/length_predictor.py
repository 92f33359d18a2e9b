"""How many tokens a request will generate, learned from those that ended.

The default keeps running means at several levels of detail and shrinks each towards the coarser
one, so that it is sensible from the first request on and sharpens where there is history.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Protocol

from ..request import EngineRequest

PREFIX_TOKENS = 16
"""So many first tokens of a prompt tell which application, or system prompt, it is of."""


class LengthPredictor(Protocol):
    def predict(self, request: EngineRequest) -> float:
        """Expected output tokens of one choice, at least 1."""

    def learn(self, request: EngineRequest, output_tokens: int) -> None:
        """A choice of the request came to its own end after so many tokens."""


class OnlineLengthPredictor:
    """Means by max_tokens, tenant, first prompt tokens and prompt length; O(1) a request.

    `prior`: what is expected where max_tokens says nothing; `strength`: how many observations the
    coarser level counts for; `memory`: a mean's weight is capped at so many, so that it follows a
    change; `entries`: how many means are kept, the least recently used leaving first.
    """

    def __init__(
        self,
        prior: float = 256.0,
        strength: float = 4.0,
        memory: int = 64,
        entries: int = 8192,
    ) -> None:
        self._prior = prior
        self._strength = strength
        self._memory = memory
        self._entries = entries
        self._means: OrderedDict[Hashable, tuple[int, float]] = OrderedDict()

    def predict(self, request: EngineRequest) -> float:
        params = request.params
        if params.max_tokens is not None and params.ignore_eos and not params.stop_token_ids:
            return params.max_tokens
        expected = self._prior if params.max_tokens is None else params.max_tokens / 2
        for feature in _features(request):
            count, mean = self._means.get(feature, (0, 0.0))
            expected = (self._strength * expected + count * mean) / (self._strength + count)
        if params.max_tokens is not None:
            expected = min(expected, params.max_tokens)
        return max(1.0, expected, params.min_tokens)

    def learn(self, request: EngineRequest, output_tokens: int) -> None:
        for feature in _features(request):
            count, mean = self._means.pop(feature, (0, 0.0))
            count = min(count + 1, self._memory)
            self._means[feature] = (count, mean + (output_tokens - mean) / count)
        while len(self._means) > self._entries:
            self._means.popitem(last=False)


def _features(request: EngineRequest) -> Iterator[Hashable]:
    """From coarse to fine."""
    most = request.params.max_tokens
    prefix = request.prompt_token_ids[:PREFIX_TOKENS]
    length = len(request.prompt_token_ids).bit_length()
    yield ("max_tokens", most)
    yield ("tenant", request.tenant, most)
    yield ("prefix", request.tenant, prefix)
    yield ("length", request.tenant, prefix, length)
