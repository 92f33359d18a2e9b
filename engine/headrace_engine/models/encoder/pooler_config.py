"""Reads how a checkpoint pools embeddings.

sentence-transformers saves that in modules.json and in the Pooling module's config.json. Without
these files a decoder uses the last token, normalised, as decoders trained to embed do; an encoder
uses the first one, its CLS.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoints.checkpoint import Checkpoint, read_json, read_json_list
from ...core.errors import ConfigError
from ...core.pooler_config import PoolerConfig, PoolingType
from .encoder_families import encoder_family

MODULES_FILE = "modules.json"
_OVERRIDES = frozenset({"pooling_type", "normalize", "matryoshka_dimensions"})
# The modes of sentence-transformers' Pooling module: its newer names and its older switches.
_MODES = {
    "lasttoken": PoolingType.LAST,
    "mean": PoolingType.MEAN,
    "cls": PoolingType.CLS,
    "pooling_mode_lasttoken": PoolingType.LAST,
    "pooling_mode_mean_tokens": PoolingType.MEAN,
    "pooling_mode_cls_token": PoolingType.CLS,
}
_MODULES = frozenset({"Transformer", "Pooling", "Normalize"})


def is_embedding_model(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint was saved to embed (by sentence-transformers, without a head, or for
    late interaction), or to score pairs of texts."""
    modules = (checkpoint.folder / MODULES_FILE).is_file()
    of_tokens = checkpoint.token_vector_size is not None
    return modules or checkpoint.has_no_head or of_tokens or _scores(checkpoint)


def _scores(checkpoint: Checkpoint) -> bool:
    return checkpoint.scores_pairs and encoder_family(checkpoint) is not None


def read_pooler_config(checkpoint: Checkpoint, overrides: Mapping[str, object]) -> PoolerConfig:
    """Reads a checkpoint's pooling; the setting `pooler_config` overrides it. Raises
    ConfigError."""
    if _scores(checkpoint):
        # The model returns a pair's score at each of its tokens.
        return PoolerConfig(
            size=1, pooling_type=PoolingType.CLS, normalize=False, bidirectional=True
        )
    config = checkpoint.config
    if checkpoint.token_vector_size is not None:
        return _of_tokens(checkpoint, checkpoint.token_vector_size, overrides)
    encoder = encoder_family(checkpoint)
    if encoder is None:
        _check_causal(checkpoint)
    field = "hidden_size" if encoder is None else encoder.size_field
    if encoder is None:
        text_config = config.get("text_config")
        size = (text_config if isinstance(text_config, Mapping) else config).get(field)
    else:
        size = encoder.vector_size(config)
    if type(size) is not int or size < 1:
        raise ConfigError(
            f"{checkpoint.folder / 'config.json'}: {field} must be a whole number above 0, not "
            f"{size!r:.40}"
        )
    default = PoolingType.LAST if encoder is None else PoolingType.CLS
    pooling, normalize = _from_modules(checkpoint.folder, default)
    listed: Any = config.get("matryoshka_dimensions")
    if listed is None and config.get("is_matryoshka"):
        listed = "any"
    return PoolerConfig(
        size=size,
        pooling_type=_pooling_type(overrides.get("pooling_type", pooling)),
        normalize=_flag(overrides.get("normalize", normalize)),
        matryoshka_dimensions=_dimensions(overrides.get("matryoshka_dimensions", listed), size),
        bidirectional=encoder is not None,
    )


def _of_tokens(checkpoint: Checkpoint, size: int, overrides: Mapping[str, object]) -> PoolerConfig:
    if overrides:
        raise ConfigError(
            f"pooler_config: {checkpoint.architecture} makes a vector for each token, and nothing "
            "of that can be set: leave it out"
        )
    return PoolerConfig(
        size=size,
        pooling_type=PoolingType.ALL,
        bidirectional=encoder_family(checkpoint) is not None,
    )


def _check_causal(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    if config.get("is_causal") is False or config.get("use_bidirectional_attention"):
        raise ConfigError(
            f"{checkpoint.folder / 'config.json'}: the decoder attends in both directions, which "
            "is not supported; use an encoder or a causal decoder"
        )


def check_overrides(overrides: Mapping[str, object]) -> None:
    """Raises ConfigError for a field that the setting `pooler_config` does not have."""
    unknown = sorted(overrides.keys() - _OVERRIDES)
    if unknown:
        raise ConfigError(
            f"pooler_config: unknown field {unknown[0]!r}; it has {', '.join(sorted(_OVERRIDES))}"
        )


def _pooling_type(value: object) -> PoolingType:
    kinds = {str(kind): kind for kind in PoolingType if kind is not PoolingType.ALL}
    found = kinds.get(str(value).upper())
    if found is None:
        raise ConfigError(
            f"pooler_config: pooling_type must be one of {', '.join(kinds)}, not {value!r:.40}"
        )
    return found


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"pooler_config: normalize must be true or false, not {value!r:.40}")
    return value


def _dimensions(value: object, size: int) -> frozenset[int] | None:
    if value is None:
        return frozenset()
    if value == "any":
        return None
    if not isinstance(value, list) or not all(type(n) is int and 0 < n <= size for n in value):
        raise ConfigError(
            f"matryoshka_dimensions must be a list of numbers from 1 to {size}, or 'any', not "
            f"{value!r:.80}"
        )
    return frozenset(value)


def _from_modules(folder: Path, default: PoolingType) -> tuple[PoolingType, bool]:
    path = folder / MODULES_FILE
    if not path.is_file():
        return default, True
    kinds = [(str(item.get("type", "")).rpartition(".")[2], item) for item in read_json_list(path)]
    for kind, _ in kinds:
        if kind not in _MODULES:
            raise ConfigError(
                f"{path}: module {kind!r:.60} is not supported; there are "
                f"{', '.join(sorted(_MODULES))}"
            )
    found = [item for kind, item in kinds if kind == "Pooling"]
    pooling = _read_mode(folder / str(found[0].get("path", ""))) if found else default
    return pooling, any(kind == "Normalize" for kind, _ in kinds)


def _read_mode(folder: Path) -> PoolingType:
    path = folder / "config.json"
    config = read_json(path)
    mode = config.get("pooling_mode")
    if mode is None:
        chosen = [
            name for name, on in config.items() if name.startswith("pooling_mode_") and on is True
        ]
        mode = chosen[0] if len(chosen) == 1 else chosen
    if not isinstance(mode, str) or mode not in _MODES:
        raise ConfigError(
            f"{path}: pooling_mode {mode!r:.80} is not supported; there are last token, mean and "
            "cls. Name another with pooler_config"
        )
    return _MODES[mode]
