"""How much of a prompt each engine is believed to have cached.

Walks along the prompt's blocks, and ends where no engine has the next one. So a prompt that no
engine knows costs one hash.
"""

from collections.abc import Mapping

from ..wire.block_hashes import block_hash, prefix_seed
from ..wire.messages import GenerateRequest
from .kv_events import BlockFilter

MAX_BLOCKS = 8192  # blocks of a prompt that are hashed
MAX_LOOKUPS = 65_536  # blocks that are looked up, of all engines together


class PrefixMatch:
    """The match of one prompt with the engines' `filters`, by engine id.

    `tokens` has the leading tokens of the prompt that each engine is believed to have, without the
    prompt's last token, which engines always compute.
    """

    __slots__ = ("_blocks", "_lookups", "_walks", "tokens")

    def __init__(self, request: GenerateRequest, filters: Mapping[str, BlockFilter]) -> None:
        self.tokens: dict[str, int] = {}
        self._blocks, self._lookups = MAX_BLOCKS, MAX_LOOKUPS
        by_size: dict[int, dict[str, BlockFilter]] = {}
        for engine, known in filters.items():
            by_size.setdefault(known.block_size, {})[engine] = known
        self._walks = [_Walk(request, size, engines) for size, engines in by_size.items()]

    def advance(self, blocks: int = MAX_BLOCKS) -> bool:
        """Looks at up to `blocks` further blocks; returns whether the match is complete."""
        for _ in range(blocks):
            if not self._walks:
                break
            walk = self._walks[-1]
            self._blocks -= 1
            self._lookups -= len(walk.engines)
            if self._blocks < 0 or self._lookups < 0:
                self._walks.clear()
            elif not walk.step(self.tokens):
                self._walks.pop()
        return not self._walks


class _Walk:
    """A walk along the blocks of one size, with the engines that have all blocks so far."""

    __slots__ = ("_before", "_end", "_request", "_size", "engines")

    def __init__(
        self, request: GenerateRequest, size: int, engines: Mapping[str, BlockFilter]
    ) -> None:
        self._request, self._size = request, size
        self._before = prefix_seed(request.cache_salt, request.adapter)
        self._end = size
        self.engines = engines

    def step(self, tokens: dict[str, int]) -> bool:
        """Enters in `tokens` which engines have the next block; returns whether any of them has."""
        request, end = self._request, self._end
        if end >= len(request.prompt_token_ids):
            return False
        begin = end - self._size
        self._before = block_hash(
            self._before, request.prompt_token_ids, request.images, begin, end
        )
        self.engines = {
            engine: known for engine, known in self.engines.items() if known.may_have(self._before)
        }
        for engine in self.engines:
            tokens[engine] = end
        self._end += self._size
        return bool(self.engines)
