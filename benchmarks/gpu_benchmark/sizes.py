"""The workload sizes of gpu.py: full on a GPU, or small enough for seconds on a GPU or a CPU."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Sizes:
    """Workload sizes: full on a GPU, or tiny, to check that everything runs.

    `decodes` are (batch, context, goal), `few_decodes` the same for variants of a model, `prefills`
    (prompts, length), `lora` (batch, context, adapters, rank). Contexts and lengths are in tokens;
    a goal is a share of the roofline.
    """

    device: str
    copy_bytes: int
    square: int
    rounds: int
    max_num_seqs: int
    decodes: tuple[tuple[int, int, float | None], ...]
    few_decodes: tuple[tuple[int, int, float | None], ...]
    prefills: tuple[tuple[int, int], ...]
    lora: tuple[int, int, int, int]
    steps: int
    requests: int
    peer_requests: int
    peer_seconds: float
    longest: int
    peer: Mapping[str, Any]
    engine: Mapping[str, Any]
    model_shapes: bool = True
    all_dtypes: tuple[str, ...] = ("Llama 8B",)


FULL = Sizes(
    device="cuda",
    copy_bytes=4 << 30,
    square=8192,
    rounds=10,
    max_num_seqs=256,
    decodes=((1, 1024, 0.85), (64, 2048, 0.75), (256, 1024, 0.65)),
    few_decodes=((1, 1024, None), (64, 2048, None)),
    prefills=((1, 8192), (16, 1024)),
    lora=(64, 1024, 8, 16),
    steps=32,
    requests=1000,
    peer_requests=256,
    peer_seconds=30.0,
    longest=2048,
    peer={},
    engine={"attention_backend": "triton"},
)
TINY = Sizes(
    device="cpu",
    copy_bytes=1 << 20,
    square=64,
    rounds=2,
    max_num_seqs=4,
    decodes=((1, 16, 0.0), (3, 32, 0.0)),
    few_decodes=((2, 16, None),),
    prefills=((1, 64), (2, 32)),
    lora=(3, 32, 2, 4),
    steps=3,
    requests=6,
    peer_requests=1,
    peer_seconds=30.0,
    longest=16,
    peer={"num_blocks": 8, "max_batch_tokens": 64},
    engine={"num_blocks": 256},
    model_shapes=False,
)
# All parts with tiny models, on a GPU or the null device.
SMALL = replace(
    TINY, device="cuda", engine={"num_blocks": 256, "attention_backend": "triton"},
    peer={"num_blocks": 64, "max_batch_tokens": 64},
)  # fmt: skip
SIZES = {"full": FULL, "small": SMALL, "tiny": TINY}
