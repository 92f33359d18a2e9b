"""Shapes of the models that gpu.py measures, and the roofline time of their steps."""

import math
import random
from dataclasses import dataclass, replace
from typing import Any

# Bytes per weight of a linear layer. fp8 has a scale for each output, which is negligible; 4-bit
# weights have a float16 scale and a 4-bit zero point for each group.
GROUP = 128
WEIGHT_BYTES = {"": 2.0, "fp8": 1.0, "gptq": 0.5 + 2.5 / GROUP}


@dataclass(frozen=True)
class Shape:
    """A Llama in bfloat16 with random weights; `context` is its max_position_embeddings. With
    `experts` above 0 it is a mixture of experts of size `inner`; each token uses `chosen` of them.
    Linear layers may be quantised to fp8 or to 4 bits (gptq). For a `variant` of a model fewer
    batches are measured.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    tied: bool = False
    experts: int = 0
    chosen: int = 1
    quantization: str = ""
    variant: bool = False

    def engine_options(self) -> dict[str, Any]:
        """The settings that an engine needs for this model besides its config.json."""
        return {"quantization": "fp8"} if self.quantization == "fp8" else {}

    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "tie_word_embeddings": self.tied,
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_act": "silu",
            "bos_token_id": 0,
            "eos_token_id": 1,
            **(self._mixture() if self.experts else {}),
            **(self._four_bits() if self.quantization == "gptq" else {}),
        }

    def _four_bits(self) -> dict[str, Any]:
        stored = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}
        return {"quantization_config": stored}

    def _mixture(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": self.experts,
            "num_experts_per_tok": self.chosen,
            "moe_intermediate_size": self.inner,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    @property
    def layer_weights(self) -> int:
        """The number of weights that each token is multiplied with, without the head's."""
        return self._layer_weights(self.chosen)

    def _layer_weights(self, experts: float) -> int:
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * query + 2 * key_value + self.experts)
        return round(self.layers * (attention + experts * 3 * self.hidden * self.inner))

    def step_bytes(self, tokens: int = 1) -> int:
        """Bytes of weights that a step of `tokens` tokens reads: all, except that only some rows of
        the embeddings are read. Of a mixture, it reads the experts that any token uses, if all
        experts are equally likely."""
        left_out = (1 - self.chosen / self.experts) ** tokens if self.experts else 0.0
        read = self._layer_weights(max(1, self.experts) * (1 - left_out))
        return round(WEIGHT_BYTES[self.quantization] * read) + 2 * self.vocab * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's KV."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


LLAMA_8B = Shape(4096, 14336, 32, 32, 8, 128, 128_256, 16_384)
TINY = Shape(64, 128, 2, 4, 2, 16, 512, 2048)
SHAPES = {
    "8b": LLAMA_8B,
    "1b": Shape(2048, 8192, 16, 32, 8, 64, 128_256, 16_384, tied=True),
    "8b-lora": replace(LLAMA_8B, variant=True),
    "8b-fp8": replace(LLAMA_8B, quantization="fp8", variant=True),
    "8b-int4": replace(LLAMA_8B, quantization="gptq", variant=True),
    # Qwen3-30B-A3B with 8 of its 48 layers.
    "moe": Shape(*(2048, 768, 8, 32, 4, 128, 151_936, 16_384), experts=128, chosen=8, variant=True),
    "tiny": TINY,
    "tiny-fp8": replace(TINY, quantization="fp8", variant=True),
    "tiny-int4": replace(TINY, hidden=128, quantization="gptq", variant=True),
    "tiny-moe": replace(TINY, inner=32, experts=4, chosen=2, variant=True),
}


@dataclass(frozen=True)
class Roofs:
    """The speed of the device: bytes read and written per second, and operations per second."""

    bandwidth: float
    products: float

    def decode(self, shape: Shape, batch: int, context: int) -> dict[str, float]:
        """The microseconds of each kind of kernel in a decode step, if it only reads or only
        multiplies."""
        operations = 2.0 * batch * (shape.layer_weights + shape.vocab * shape.hidden)
        read = shape.step_bytes(batch)
        weights = max(read / self.bandwidth, operations / self.products)
        keys = batch * context * shape.kv_bytes / self.bandwidth
        return {"products": weights * 1e6, "attention": keys * 1e6}

    def step(self, shape: Shape, runs: list[tuple[int, int]], sampled: int) -> float:
        """The least seconds that a step with these runs (tokens, number of keys at their end) can
        take."""
        tokens = sum(new for new, _ in runs)
        read = shape.step_bytes(tokens) + sum(keys for _, keys in runs) * shape.kv_bytes
        operations = 2.0 * (tokens * shape.layer_weights + sampled * shape.vocab * shape.hidden)
        operations += sum(attention_operations(shape, new, keys) for new, keys in runs)
        return max(read / self.bandwidth, operations / self.products)


def attention_operations(shape: Shape, new: int, keys: int) -> float:
    """The number of operations for the last `new` of `keys` positions under causal masking."""
    pairs = new * keys - new * (new - 1) / 2
    return 4.0 * shape.layers * shape.heads * shape.head_dim * pairs


@dataclass(frozen=True)
class Job:
    """A request: the prompt's token ids, and the number of tokens to generate."""

    prompt: list[int]
    output: int


def conversations(count: int, vocab: int, longest: int) -> list[Job]:
    """Lengths similar to ShareGPT: prompts of about 220 and outputs of about 200 tokens on average,
    both with long tails."""
    rng = random.Random(0)

    def length(median: float, spread: float) -> int:
        return max(4, min(longest, round(rng.lognormvariate(math.log(median), spread))))

    return [
        Job([rng.randrange(10, vocab) for _ in range(length(120, 1.1))], length(140, 0.85))
        for _ in range(count)
    ]


def predicted_seconds(
    shape: Shape, roofs: Roofs, jobs: list[Job], max_num_seqs: int, budget: int
) -> float:
    """The roofline time of all jobs with continuous batching: each step has a decode of each
    running sequence, and fills the rest of its tokens with prompts."""
    waiting = [(len(job.prompt), job.output) for job in jobs][::-1]
    running: list[tuple[int, int]] = []  # (keys, tokens still to generate)
    seconds, part = 0.0, 0
    while waiting or running:
        runs = [(1, keys + 1) for keys, _ in running]
        left, sampled = budget - len(runs), len(runs)
        begun: list[tuple[int, int]] = []
        while waiting and left > 0 and len(running) + len(begun) < max_num_seqs:
            prompt, output = waiting[-1]
            taken = min(left, prompt - part)
            runs.append((taken, part + taken))
            left, part = left - taken, part + taken
            if part == prompt:
                waiting.pop()
                begun.append((prompt, output - 1))
                part, sampled = 0, sampled + 1
        seconds += roofs.step(shape, runs, sampled)
        grown = [(keys + 1, rest - 1) for keys, rest in running]
        running = [one for one in (*grown, *begun) if one[1] > 0]
    return seconds
