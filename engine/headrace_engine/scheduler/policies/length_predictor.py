"""Predicts how many tokens a request generates, learned from finished requests.

The default predictor keeps running means at several levels of detail and shrinks each towards the
coarser one. So it gives sensible values from the first request on and improves with history.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Protocol

from ...core.request import EngineRequest

# The first tokens of a prompt identify its application or system prompt.
PREFIX_TOKENS = 16


class LengthPredictor(Protocol):
    def predict(self, request: EngineRequest) -> float:
        """Expected output tokens of one choice, at least 1."""

    def learn(self, request: EngineRequest, output_tokens: int) -> None:
        """Called when a choice ended by itself after `output_tokens` tokens."""


class OnlineLengthPredictor:
    """Running means by max_tokens, tenant, first prompt tokens and prompt length; O(1) a request.

    `prior` is the expected length without max_tokens. The coarser level counts as `strength`
    observations. A mean's weight is at most `memory` observations, so that it follows changes.
    `entries` means are kept; the least recently used are dropped.
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
    """Keys of the means that a request belongs to, from coarse to fine."""
    most = request.params.max_tokens
    prefix = request.prompt_token_ids[:PREFIX_TOKENS]
    length = len(request.prompt_token_ids).bit_length()
    yield ("max_tokens", most)
    yield ("tenant", request.tenant, most)
    yield ("prefix", request.tenant, prefix)
    yield ("length", request.tenant, prefix, length)
