"""Offline embeddings: `LLM(model, task="embed").embed(prompts)`, with vLLM's names."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot
from operator import mul
from typing import TYPE_CHECKING

from tqdm import tqdm

from headrace_common.sampling.params import SamplingParams
from headrace_common.sampling.pooling import PoolingParams

from ..core.errors import RequestError
from ..core.images import PromptImage
from ..core.request import EngineRequest, FinishReason
from ..engine.engine import Engine

if TYPE_CHECKING:
    import torch

# Token ids with those of images, and the images.
PooledPrompt = tuple[Sequence[int], tuple[PromptImage, ...]]


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """An embedding of float32 numbers."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class PoolingOutput:
    """An embedding as a tensor."""

    data: "torch.Tensor"


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput:
    """A prompt and its embedding as a tensor."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """A cosine, -1 to 1; of models of late interaction up to the number of the query's tokens."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """A pair of prompts, with the tokens of both, and its score."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True


def embed(
    engine: Engine, prompts: Sequence[PooledPrompt], pooling: PoolingParams, *, use_tqdm: bool
) -> list[EmbeddingRequestOutput]:
    """Embeds prompts and returns the results in their order. The engine must be idle.

    Raises RequestError for a prompt that the engine cannot run, or whose embedding is not finite.
    """
    names = {f"embed-{index}": prompt for index, prompt in enumerate(prompts)}
    found: dict[str, EmbeddingRequestOutput] = {}
    try:
        for name, prompt in names.items():
            engine.add_request(_request(name, prompt, pooling))
        with tqdm(total=len(names), desc="Embedded prompts", disable=not use_tqdm) as bar:
            while engine.has_work:
                for output in engine.step():
                    if output.embedding is None or output.finish_reason is FinishReason.ERROR:
                        problem = f"{output.request_id}: the model's output is not finite"
                        raise RequestError(f"{problem}: use another dtype")
                    found[output.request_id] = EmbeddingRequestOutput(
                        output.request_id,
                        list(names[output.request_id][0]),
                        EmbeddingOutput(array("f", output.embedding).tolist()),
                        output.cached_tokens,
                    )
                    bar.update()
    finally:
        for name in names:
            if name not in found:
                engine.abort(name)
    return [found[name] for name in names]


def pooled(
    found: Sequence[EmbeddingRequestOutput], *, of_tokens: bool
) -> list[PoolingRequestOutput]:
    """The same embeddings as tensors: [size], or with a vector for each token [tokens, size]."""
    return [
        PoolingRequestOutput(
            one.request_id, one.prompt_token_ids, PoolingOutput(_tensor(one, of_tokens))
        )
        for one in found
    ]


def _tensor(one: EmbeddingRequestOutput, of_tokens: bool) -> "torch.Tensor":
    import torch

    numbers = torch.tensor(one.outputs.embedding)
    return numbers.view(len(one.prompt_token_ids), -1) if of_tokens else numbers


def scored(
    left: Sequence[EmbeddingRequestOutput],
    right: Sequence[EmbeddingRequestOutput],
    *,
    of_tokens: bool,
) -> list[ScoringRequestOutput]:
    """The cosine of each pair, or with a vector for each token the sum of the largest products."""
    return [
        ScoringRequestOutput(
            f"{one.request_id}_{two.request_id}",
            [*one.prompt_token_ids, *two.prompt_token_ids],
            ScoringOutput(
                _late(one, two)
                if of_tokens
                else _cosine(one.outputs.embedding, two.outputs.embedding)
            ),
        )
        for one, two in zip(left, right, strict=True)
    ]


def _late(query: EmbeddingRequestOutput, document: EmbeddingRequestOutput) -> float:
    """For each vector of the query the largest product with one of the document; their sum."""
    products = _tensor(query, True) @ _tensor(document, True).T
    return float(products.amax(dim=1).sum())


def _cosine(one: Sequence[float], two: Sequence[float]) -> float:
    product: float = sum(map(mul, one, two))
    return product / (hypot(*one) * hypot(*two))


def _request(name: str, prompt: PooledPrompt, pooling: PoolingParams) -> EngineRequest:
    token_ids, images = prompt
    return EngineRequest(
        request_id=name,
        prompt_token_ids=tuple(token_ids),
        params=SamplingParams(max_tokens=1),
        seed=0,
        pooling=pooling,
        images=images,
    )
