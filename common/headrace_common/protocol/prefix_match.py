"""How much of a prompt each engine is believed to have cached.

Walks along the prompt's blocks, and ends where no engine has the next one. So a prompt that no
engine knows costs one hash.
"""

from collections.abc import Mapping

from ..wire.block_hashes import block_hash, block_position, prefix_seed
from ..wire.messages import GenerateRequest
from .kv_events import BlockFilter

MAX_BLOCKS = 8192  # blocks of a prompt that are hashed
MAX_LOOKUPS = 65_536  # blocks that are looked up, of all engines together


class PrefixMatch:
    """The match of one prompt with the engines' `filters`, by engine id.

    `tokens` has the leading tokens of the prompt that each engine is believed to have, without the
    prompt's last token, which engines always compute; once the match is complete.
    """

    __slots__ = ("_blocks", "_lookups", "_walks", "tokens")

    def __init__(self, request: GenerateRequest, filters: Mapping[str, BlockFilter]) -> None:
        self.tokens: dict[str, int] = {}
        self._blocks, self._lookups = MAX_BLOCKS, MAX_LOOKUPS
        alike: dict[tuple[int, int], dict[str, bytearray]] = {}
        for engine, known in filters.items():
            alike.setdefault((known.block_size, known.bits), {})[engine] = known.content
        self._walks = [_Walk(request, *form, engines) for form, engines in alike.items()]

    def advance(self, blocks: int = MAX_BLOCKS) -> bool:
        """Looks at up to `blocks` further blocks; returns whether the match is complete."""
        for _ in range(blocks):
            if not self._walks:
                break
            walk = self._walks[-1]
            self._blocks -= 1
            self._lookups -= len(walk.engines)
            if self._blocks < 0 or self._lookups < 0:
                for walk in self._walks:
                    walk.end(self.tokens)
                self._walks.clear()
            elif not walk.step(self.tokens):
                walk.end(self.tokens)
                self._walks.pop()
        return not self._walks


class _Walk:
    """A walk along the blocks of one size, with the filters of `bits` of the engines that have all
    blocks so far."""

    __slots__ = ("_before", "_bits", "_matched", "_request", "_size", "engines")

    def __init__(
        self, request: GenerateRequest, size: int, bits: int, engines: dict[str, bytearray]
    ) -> None:
        self._request, self._size, self._bits = request, size, bits
        self._before = prefix_seed(request.cache_salt, request.adapter)
        self._matched = 0
        self.engines = engines

    def step(self, tokens: dict[str, int]) -> bool:
        """Looks at the next block, and enters the tokens of the engines that have it not; returns
        whether any engine has it."""
        request, begin = self._request, self._matched
        end = begin + self._size
        if end >= len(request.prompt_token_ids):
            return False
        self._before = block_hash(
            self._before, request.prompt_token_ids, request.images, begin, end
        )
        position = block_position(self._before, self._bits)
        at, bit = position >> 3, 1 << (position & 7)
        if not all([content[at] & bit for content in self.engines.values()]):
            for name in [name for name, content in self.engines.items() if not content[at] & bit]:
                del self.engines[name]
                tokens[name] = begin
        self._matched = end
        return bool(self.engines)

    def end(self, tokens: dict[str, int]) -> None:
        """Enters the tokens of the engines that are left."""
        tokens.update(dict.fromkeys(self.engines, self._matched))
