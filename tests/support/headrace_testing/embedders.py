"""Tiny embedding checkpoints as they are published; the vectors of an engine, and those of
transformers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from tokenizers.processors import TemplateProcessing

from headrace_common.sampling.params import SamplingParams
from headrace_common.sampling.pooling import PoolingParams
from headrace_engine.core.request import EngineRequest
from headrace_engine.engine.engine import Engine

from .checkpoints import VOCAB, make_config, make_tokenizer
from .engines import engine_config, make_runner

Vector = npt.NDArray[np.float32]

POSITIONS = 128
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
_POSITIONS_AFTER_PADDING: dict[str, Any] = {
    **_SIZES,
    "pad_token_id": 1,
    "max_position_embeddings": POSITIONS + 2,
}
# For each model type that is known as an encoder: transformers' config class and its arguments.
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", _SIZES),
    "camembert": ("CamembertConfig", _POSITIONS_AFTER_PADDING),
    "distilbert": (
        "DistilBertConfig",
        {
            "vocab_size": VOCAB,
            "dim": 64,
            "hidden_dim": 96,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": POSITIONS,
            "initializer_range": 0.2,
        },
    ),
    "electra": ("ElectraConfig", {**_SIZES, "embedding_size": 32}),
    "modernbert": (
        "ModernBertConfig",
        {
            **_SIZES,
            "local_attention": 16,
            "global_attn_every_n_layers": 2,
            "bos_token_id": 1,
            "cls_token_id": 1,
            "eos_token_id": 2,
            "sep_token_id": 2,
        },
    ),
    "mpnet": ("MPNetConfig", _POSITIONS_AFTER_PADDING),
    "roberta": ("RobertaConfig", _POSITIONS_AFTER_PADDING),
    "xlm-roberta": ("XLMRobertaConfig", _POSITIONS_AFTER_PADDING),
}


def save_embedder(folder: Path, shape: str, mode: str | None, **changes: Any) -> Path:
    """Saves a bare model, without a head, as sentence-transformers does; without a mode, saves only
    the model."""
    torch.manual_seed(3)
    build: Any = transformers.AutoModel
    config = _encoder(shape, **changes) if shape in ENCODERS else make_config(shape, **changes)
    build.from_config(config, dtype=torch.float32).save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    if mode is not None:
        write_modules(folder, ("Transformer", "Pooling", "Normalize"))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(
            json.dumps({f"pooling_mode_{mode}": True})
        )
    return folder


def save_cross_encoder(folder: Path, shape: str, **changes: Any) -> Path:
    """A classifier with one label, and a tokenizer that puts special tokens around and between
    texts."""
    torch.manual_seed(3)
    build: Any = transformers.AutoModelForSequenceClassification
    config = _encoder(shape, num_labels=1, **changes)
    build.from_config(config, dtype=torch.float32).save_pretrained(folder)
    pair_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def pair_tokenizer() -> Any:
    """A tokenizer that joins texts as BERT does: [CLS] a [SEP] b [SEP], with two token types."""
    tokenizer = make_tokenizer()
    first, separator = tokenizer.id_to_token(1), tokenizer.id_to_token(2)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A {separator}",
        pair=f"{first} $A {separator} $B:1 {separator}:1",
        special_tokens=[(first, 1), (separator, 2)],
    )
    return tokenizer


def _encoder(name: str, **changes: Any) -> transformers.PretrainedConfig:
    kind, options = ENCODERS[name]
    config: transformers.PretrainedConfig = getattr(transformers, kind)(**{**options, **changes})
    return config


def write_modules(folder: Path, names: Sequence[str]) -> None:
    paths = {"Pooling": "1_Pooling"}
    modules = [
        {"idx": i, "name": str(i), "path": paths.get(name, ""), "type": f"st.models.{name}"}
        for i, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))


def hidden_states(folder: Path, prompt: Sequence[int]) -> torch.Tensor:
    load: Any = transformers.AutoModel.from_pretrained
    model = load(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        states: torch.Tensor = model(torch.tensor([prompt])).last_hidden_state[0]
    return states


def normalized(vector: torch.Tensor) -> Vector:
    found: Vector = torch.nn.functional.normalize(vector, dim=0).numpy()
    return found


def embedding_request(
    name: str, prompt: Sequence[int], dimensions: int | None = None
) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=1),
        seed=0,
        pooling=PoolingParams(dimensions=dimensions),
    )


def embed(
    folder: Path, prompts: Sequence[Sequence[int]], dimensions: int | None = None, **options: Any
) -> list[Vector]:
    config = engine_config(folder, **options)
    engine = Engine(config, make_runner(folder, **options))
    for index, prompt in enumerate(prompts):
        engine.add_request(embedding_request(str(index), prompt, dimensions))
    found: dict[str, Vector] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.embedding is not None and output.finish_reason == "stop"
            found[output.request_id] = np.frombuffer(output.embedding, dtype="<f4")
    assert engine.stats().blocks_used == 0
    return [found[str(index)] for index in range(len(prompts))]
