"""Records the launches of this project's kernels instead of launching them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from headrace_engine.attention import triton as attention
from headrace_engine.kernels.triton import sampling, staging
from headrace_engine.layers import triton_float8
from headrace_engine.lora import expert_tiles, tiles
from headrace_engine.operators import (
    batch_invariant,
    packed_experts,
    packed_linear,
    triton_experts,
    triton_recurrent,
    tuned_float8,
    tuned_linear,
)
from headrace_engine.operators import triton as triton_ops

OPTIONS = ("num_warps", "num_stages", "launch_pdl")


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A kernel, its arguments by name, the grid and Triton's options."""

    kernel: Any
    bound: dict[str, Any]
    grid: tuple[int, ...]
    options: dict[str, int]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


class _Recorder:
    """Replaces a kernel and records its launches."""

    def __init__(self, kernel: Any, found: list[KernelLaunch]) -> None:
        self._kernel, self._found = kernel, found

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(extent > 0 for extent in grid)

        def launch(*arguments: Any, **named: Any) -> None:
            options = {key: named.pop(key) for key in OPTIONS if key in named}
            bound = dict(zip(self._kernel.arg_names, arguments, strict=False)) | named
            self._found.append(KernelLaunch(self._kernel, bound, grid, options))

        return launch


def record(run: Callable[[], object]) -> list[KernelLaunch]:
    """Runs `run` and returns the launches of this project's kernels."""
    found: list[KernelLaunch] = []
    with ExitStack() as stack:
        for module, name in _kernels():
            recorder = _Recorder(getattr(module, name), found)
            stack.enter_context(patch.object(module, name, recorder))
        run()
    return found


def _kernels() -> Iterator[tuple[Any, str]]:
    for module in (
        *(attention, batch_invariant, triton_experts, triton_float8, triton_ops, staging, tiles),
        *(expert_tiles, tuned_float8, packed_linear, packed_experts),
        *(tuned_linear, sampling, triton_recurrent),
    ):
        for name in vars(module):
            if name.endswith("_kernel"):
                yield module, name
