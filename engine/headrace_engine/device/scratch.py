"""Scratch memory that is allocated once, grown rarely and never freed.

Captured CUDA graphs keep the addresses they were captured with, so outgrown buffers are kept too.
Sizes are powers of two: all buffers together are smaller than twice the last one.
"""

import torch


class Scratch:
    """Named scratch buffers of each device."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], list[torch.Tensor]] = {}
        self._counters: dict[torch.device, list[torch.Tensor]] = {}

    def take(self, name: str, elements: int, device: torch.device) -> torch.Tensor:
        """Returns at least `elements` uninitialised float32 numbers, valid until the next call with
        this name."""
        made = self._buffers.setdefault((name, device), [])
        if not made or made[-1].numel() < elements:
            size = 1 << (elements - 1).bit_length()
            made.append(torch.empty(size, dtype=torch.float32, device=device))
        return made[-1]

    def split(
        self, tiles: int, splits: int, elements: int, device: torch.device
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Memory for tiles of `elements` numbers, each the sum of `splits` parts: float32 numbers
        for the parts, and a counter for each tile. Both None if `splits` is 1."""
        if splits == 1:
            return None, None
        partial = self.take("partial", tiles * splits * elements, device)
        return partial, self.counters(tiles, device)

    def counters(self, count: int, device: torch.device) -> torch.Tensor:
        """At least `count` int32 zeros. A kernel that counts with them must leave zeros."""
        made = self._counters.setdefault(device, [])
        if not made or len(made[-1]) < count:
            size = 1 << (count - 1).bit_length()
            made.append(torch.zeros(size, dtype=torch.int32, device=device))
        return made[-1]
