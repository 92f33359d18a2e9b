"""Attention of whole layers in the shapes of real models, for GPUs: thousands of keys, decodes
whose keys are split, beside chunks of prompts. Needs only torch.
"""

import torch

from headrace_engine.core.attention_backend import AttentionBackend, LayerParams

from .attention_scenes import Case, Scene

RUNS = ((1023, 1), (0, 1), (5000, 1), (255, 1), (256, 1), (700, 300), (0, 513), (31, 2))
SHAPES = {
    "Llama 8B": Case(RUNS, 32, 8, 128, 16, LayerParams(128**-0.5)),
    "Llama 1B": Case(RUNS, 32, 8, 64, 16, LayerParams(64**-0.5)),
    "Qwen 7B": Case(RUNS, 28, 4, 128, 32, LayerParams(128**-0.5)),
    "Gemma 2": Case(RUNS, 8, 4, 256, 16, LayerParams(256**-0.5, 50.0, 512)),
    "Phi 2": Case(RUNS, 32, 32, 80, 16, LayerParams(80**-0.5)),
    "head of 192": Case(RUNS, 16, 2, 192, 128, LayerParams(192**-0.5)),
}
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def model_scene(
    case: Case, backend: AttentionBackend, dtype: torch.dtype, device: torch.device
) -> Scene:
    """A scene with blocks for all keys of the model."""
    blocks = sum(-(-sum(run) // case.block_size) for run in case.runs)
    return Scene(case, backend, dtype, device, blocks)


def model_output(
    case: Case, backend: AttentionBackend, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[T, Hq, D] of one step of all runs."""
    starts, ends = [run[0] for run in case.runs], [sum(run) for run in case.runs]
    return model_scene(case, backend, dtype, device).forward(
        list(range(len(starts))), starts, ends
    )[0]
