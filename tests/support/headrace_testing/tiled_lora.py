"""Emulates the Triton kernels of adapters with torch, for tests of whole models: Triton's
interpreter is too slow for them.

The emulation reads the kernels' own arguments at each launch, as the kernels do.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from headrace_engine.lora import tiles
from headrace_engine.lora.batch import LoRALimits, LoRAProducts, Move
from headrace_engine.lora.tiles import TILE, TiledProducts
from headrace_engine.operators.base import TorchOps


class TiledOps(TorchOps):
    """Plain torch, except that adapters use the tiled products."""

    def lora_products(self, limits: LoRALimits, move: Move) -> LoRAProducts:
        return TiledProducts(limits, move)


class _Launcher:
    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            self._run(grid[0], *arguments, **constants)

        return launch


def emulate_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "lora_shrink_kernel", _Launcher(_shrink))
    monkeypatch.setattr(tiles, "lora_expand_kernel", _Launcher(_expand))


def _programs(
    count: int, numbers: torch.Tensor, order: torch.Tensor
) -> Iterator[tuple[int, slice, torch.Tensor]]:
    """Yields the slot, the positions in `order` and the rows of each tile in use."""
    for slot, first, rows, _ in numbers[: TILE * count].view(-1, TILE).tolist():
        if slot >= 0:
            places = slice(first, first + rows)
            yield slot, places, order[places].long()


def _shrink(
    count: int,
    partial: torch.Tensor,
    x: torch.Tensor,
    down: torch.Tensor,
    ends: torch.Tensor,
    numbers: torch.Tensor,
    order: torch.Tensor,
    *_: Any,
    CHUNK: int,
    **constants: Any,
) -> None:
    partial.fill_(torch.nan)  # so that a read of a number that was never written shows
    for slot, places, rows in _programs(count, numbers, order):
        ranks = int(ends[slot, -1])
        for chunk, part in enumerate(partial):
            inputs = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
            made = x[rows, inputs].float() @ down[slot, :ranks, inputs].float().T
            part[places, :ranks] = made


def _expand(
    count: int,
    y: torch.Tensor,
    partial: torch.Tensor,
    up: torch.Tensor,
    ends: torch.Tensor,
    numbers: torch.Tensor,
    order: torch.Tensor,
    *_: Any,
    OUTPUTS: int,
    SECOND: int,
    THIRD: int,
    **constants: Any,
) -> None:
    bounds = [0, SECOND, THIRD, OUTPUTS]
    for slot, places, rows in _programs(count, numbers, order):
        low = 0
        for part, high in enumerate(ends[slot].tolist()):
            columns = slice(bounds[part], bounds[part + 1])
            inner = partial[:, places, low:high].sum(0).to(up.dtype)
            y[rows, columns] += inner @ up[slot, : high - low, columns]
            low = high
