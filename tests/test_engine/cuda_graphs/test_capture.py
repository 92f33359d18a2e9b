"""What surrounds a capture of a CUDA graph."""

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from headrace_engine.cuda_graphs.capture import CudaCapture


class Graph:
    def replay(self) -> None:
        pass


def test_no_garbage_is_collected_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collected graph would make the capture invalid."""

    def graph(*_: Any, **__: Any) -> Any:
        collects.append(gc.isenabled())
        return nullcontext()

    def run() -> torch.Tensor:
        collects.append(gc.isenabled())
        return torch.zeros(1)

    collects: list[bool] = []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            CudaCapture()(run)
            assert gc.isenabled() is enabled
        finally:
            gc.enable()
    assert collects[:3] == [True, False, False], "the run before the capture, then the capture"
