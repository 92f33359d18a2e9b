"""Offline embeddings: `LLM(model, task="embed").embed(prompts)`, with vLLM's names."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

from headrace_common.sampling.params import SamplingParams
from headrace_common.sampling.pooling import PoolingParams

from ..core.errors import RequestError
from ..core.request import EngineRequest, FinishReason
from ..engine.engine import Engine


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


def embed(
    engine: Engine, prompts: Sequence[Sequence[int]], pooling: PoolingParams, *, use_tqdm: bool
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
                        list(names[output.request_id]),
                        EmbeddingOutput(array("f", output.embedding).tolist()),
                        output.cached_tokens,
                    )
                    bar.update()
    finally:
        for name in names:
            if name not in found:
                engine.abort(name)
    return [found[name] for name in names]


def _request(name: str, prompt: Sequence[int], pooling: PoolingParams) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=1),
        seed=0,
        pooling=pooling,
    )
