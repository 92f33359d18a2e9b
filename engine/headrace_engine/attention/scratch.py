"""Scratch memory that is allocated once, grown rarely and never given back.

Captured CUDA graphs keep the addresses of what they were captured with, so buffers that have been
outgrown are kept too; sizes are powers of two, so that all together are less than twice the last.
"""

import torch


class Scratch:
    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], list[torch.Tensor]] = {}
        self._counters: dict[torch.device, list[torch.Tensor]] = {}

    def take(self, name: str, elements: int, device: torch.device) -> torch.Tensor:
        """At least `elements` float32 numbers of any value, valid until the next call with this
        name."""
        made = self._buffers.setdefault((name, device), [])
        if not made or made[-1].numel() < elements:
            size = 1 << (elements - 1).bit_length()
            made.append(torch.empty(size, dtype=torch.float32, device=device))
        return made[-1]

    def split(
        self, tiles: int, splits: int, elements: int, device: torch.device
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """For tiles of so many elements that are sums of `splits` parts each: float32 numbers for
        the parts, and a counter for each tile. None where there is nothing to add up."""
        if splits == 1:
            return None, None
        partial = self.take("partial", tiles * splits * elements, device)
        return partial, self.counters(tiles, device)

    def counters(self, count: int, device: torch.device) -> torch.Tensor:
        """At least `count` int32 zeros. Whoever counts with them leaves zeros."""
        made = self._counters.setdefault(device, [])
        if not made or len(made[-1]) < count:
            size = 1 << (count - 1).bit_length()
            made.append(torch.zeros(size, dtype=torch.int32, device=device))
        return made[-1]
