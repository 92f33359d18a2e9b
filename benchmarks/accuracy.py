"""Measures the errors of lower precision: logits in bfloat16, int8 and fp8 against float32.

    python benchmarks/accuracy.py [--model headrace-demo] [--tokens 400] [--quantized FOLDER]

`--quantized` adds a checkpoint of the same model that was quantised with GPTQ, AWQ or the like.
Weights in fewer bits are measured as CPUs compute with them and as GPUs do: integers with
unrounded activations, fp8 with rounded activations (from Ada on). The KV cache in fp8 is measured
with and without fp8 weights.

Logit error is relative to the logits' spread, over every position of a random prompt. For the
bundled model, the perplexity of correct replies to held-out prompts is measured too.
"""

import argparse
import dataclasses
import random
import sys
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as F

from headrace_common.sampling.params import SamplingParams
from headrace_common.text.chat_template import encode_chat, load_chat_template
from headrace_common.text.checkpoint import local_source
from headrace_common.text.tokenizer import Tokenizer
from headrace_engine.checkpoints.checkpoint import load_checkpoint
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.request import EngineRequest, Sequence
from headrace_engine.core.step_plan import ScheduledSequence, SchedulerOutput
from headrace_engine.layers.layers import Linear
from headrace_engine.layers.quantized_weight import QuantizedWeight
from headrace_engine.model_loader import loader
from headrace_engine.model_runner.input_batch import build
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.models.linear import linear_maker
from headrace_engine.models.linear.linear_maker import QuantizedLinear
from headrace_engine.operators.base import TorchOps

DEMO = "headrace-demo"
# With this backend linear layers are computed as on GPUs; the other backends pack weights.
ROUNDED = "reference"
BLOCK_SIZE, BLOCKS = 16, 64
PER_KIND, SEED = 20, 0
PRECISIONS: tuple[dict[str, Any], ...] = (
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int8", "attention_backend": ROUNDED},
    {"dtype": "bfloat16", "quantization": "fp8"},
    {"dtype": "bfloat16", "quantization": "fp8", "attention_backend": ROUNDED},
    {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"},
    {
        "dtype": "bfloat16",
        "quantization": "fp8",
        "attention_backend": ROUNDED,
        "kv_cache_dtype": "fp8",
    },
)


class GpuOps(TorchOps):
    """Operators with packed int8 layers that multiply the same values as on GPUs."""

    def quantized_linear(
        self, weight: QuantizedWeight, bias: torch.Tensor | None, device: torch.device
    ) -> Linear:
        return QuantizedLinear(weight, bias, torch.bfloat16, device)


class Prober:
    """Computes the logits of every position of a text with a real runner."""

    def __init__(self, model: str, precision: dict[str, Any]) -> None:
        config = EngineConfig(
            model=model, num_blocks=BLOCKS, block_size=BLOCK_SIZE, max_model_len=1024, **precision
        )
        rounded = precision.get("attention_backend") == ROUNDED
        keeps = rounded and precision.get("quantization") == "fp8"
        with (
            patch.object(linear_maker, "supports_float8", lambda _: keeps),
            patch.object(loader, "TorchOps", GpuOps),
        ):
            self.runner = ModelRunner(config)
        self.runner._allocate(BLOCKS)
        self._caches = self.runner._caches

    def logits(self, ids: Rows[int]) -> torch.Tensor:
        request = EngineRequest(
            request_id="probe", prompt_token_ids=tuple(ids), params=SamplingParams(), seed=0
        )
        sequence = Sequence(request, 0, list(ids), block_table=list(range(BLOCKS)))
        run = ScheduledSequence(sequence, 0, len(ids), samples=True)
        batch = build(SchedulerOutput((run,), (), len(ids)), BLOCK_SIZE, self.runner.device).forward
        every = dataclasses.replace(batch, logits_rows=torch.arange(len(ids)))
        with torch.inference_mode():
            return self.runner.model.forward(every, self._caches).float().clone()


def replies(folder: str) -> list[tuple[list[int], int]]:
    """Held-out prompts, each with a correct reply, as token ids, and the index where each reply
    begins."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))
    from dialogues import probes

    tokenizer = Tokenizer.load(folder)
    template = load_chat_template(folder, tokenizer)
    assert template is not None, "the bundled model has a chat template"
    found = []
    for probe in probes(PER_KIND, SEED):
        before = encode_chat(tokenizer, template, [{"role": "user", "content": probe.prompt}])
        found.append((before + tokenizer.encode(min(probe.accepted)), len(before)))
    return found


def perplexity(prober: Prober, texts: Rows[tuple[list[int], int]]) -> float:
    losses = []
    for ids, begin in texts:
        logits = prober.logits(ids)[begin - 1 : -1]
        losses.append(F.cross_entropy(logits, torch.tensor(ids[begin:]), reduction="none"))
    return float(torch.cat(losses).mean().exp())


def label(precision: dict[str, Any]) -> str:
    parts = [precision["dtype"]]
    if "quantization" in precision:
        method = precision["quantization"]
        gpu = ", activations too" if method == "fp8" else ", as GPUs"
        parts.append(f"{method} weights{gpu if 'attention_backend' in precision else ''}")
    if "kv_cache_dtype" in precision:
        parts.append(f"{precision['kv_cache_dtype']} KV")
    return "; ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--quantized", help="a quantised checkpoint of the same model")
    options = parser.parse_args()
    folder = local_source(options.model)
    texts = replies(folder) if options.model == DEMO else []
    exact: torch.Tensor | None = None
    runs = [(folder, precision) for precision in PRECISIONS]
    if options.quantized:
        method = load_checkpoint(options.quantized).config["quantization_config"]["quant_method"]
        one = {"dtype": "bfloat16", "quantization": method}
        runs += [
            (options.quantized, one),
            (options.quantized, one | {"attention_backend": ROUNDED}),
        ]
    for source, precision in runs:
        prober = Prober(source, precision)
        vocabulary, drawn = prober.runner.vocab_size, random.Random(1)
        logits = prober.logits([drawn.randrange(3, vocabulary) for _ in range(options.tokens)])
        exact = logits if exact is None else exact
        error = float((logits - exact).pow(2).mean().sqrt() / exact.std())
        same = float((logits.argmax(-1) == exact.argmax(-1)).float().mean())
        line = f"{label(precision):48} logit error {error:.4f}, same best token {same:.1%}"
        print(line + (f", perplexity {perplexity(prober, texts):.4f}" if texts else ""))


if __name__ == "__main__":
    main()
