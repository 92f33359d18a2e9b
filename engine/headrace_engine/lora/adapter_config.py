"""adapter_config.json of a PEFT folder: ranks and scales, and the refusal of what is not served.

Field names and their meanings are PEFT's (`LoraConfig`). A field that would change the result and
is not supported is refused by name, never ignored.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..checkpoints.checkpoint import JsonObject, read_json
from ..checkpoints.fields import Fields
from ..core.errors import CheckpointError, ConfigError

_TRANSPOSED_UNTIL = (0, 19)
CONFIG_FILE = "adapter_config.json"
N = TypeVar("N", int, float)

# Fields that require more than A and B, unless they are null, false, "none" or an empty list.
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "lora_bias": "a bias of the adapter",
    "bias": "trained biases",
    "modules_to_save": "whole modules beside the adapter",
    "trainable_token_indices": "trained tokens",
    "layer_replication": "repeated layers",
    "alora_invocation_tokens": "an adapter that begins at a token (aLoRA)",
    "fan_in_fan_out": "transposed weights",
    "arrow_config": "a mixture of adapters (Arrow)",
    "use_bdlora": "block-diagonal matrices (BD-LoRA)",
    "monteclora_config": "sampled matrices (MonteCLoRA)",
}
# Initialisations that also change the model's own weights.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Ranks and scales. `ranks` and `alphas` are for modules whose path matches their pattern;
    `rank` and `alpha` for all others. The scale is alpha / rank or, with `rank_stabilised`, alpha /
    sqrt(rank). `transposed_experts` distinguishes A from B if experts' matrices are square."""

    path: Path
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    rank_stabilised: bool
    transposed_experts: bool = False

    def rank_of(self, module: str) -> int:
        return _matching(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        alpha, rank = _matching(self.alphas, module, self.alpha), self.rank_of(module)
        return alpha / (rank**0.5 if self.rank_stabilised else rank)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Reads the file. Raises CheckpointError if it is missing or broken, ConfigError for a
    field."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing: an adapter is a folder that PEFT's save_pretrained wrote"
        )
    content = read_json(path)
    fields = Fields(path, content)
    if fields.get("peft_type", None) != "LORA":
        raise fields.error("peft_type", "LORA, the only kind of adapter that is served")
    _refuse(fields, content)
    return AdapterConfig(
        path=path,
        rank=fields.integer("r"),
        alpha=fields.number("lora_alpha"),
        ranks=_patterns(fields, "rank_pattern", Fields.integer),
        alphas=_patterns(fields, "alpha_pattern", Fields.number),
        rank_stabilised=fields.flag("use_rslora"),
        transposed_experts=_is_old(content.get("peft_version")),
    )


def _refuse(fields: Fields, content: JsonObject) -> None:
    for name, meaning in _UNSUPPORTED.items():
        if content.get(name) not in (None, False, "none", [], {}):
            raise fields.error(name, f"unset, as {meaning} cannot be served")
    start = content.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise fields.error(
            "init_lora_weights",
            "one that leaves the model's own weights as they are: convert the adapter with PEFT "
            "(save_pretrained(path_initial_model_for_weight_conversion=...))",
        )


def _is_old(version: object) -> bool:
    """Whether a PEFT before 0.19 wrote the file; versions before 0.18 do not store their number."""
    found = re.match(r"(\d+)\.(\d+)", version) if isinstance(version, str) else None
    return found is None or (int(found[1]), int(found[2])) < _TRANSPOSED_UNTIL


def _patterns(fields: Fields, name: str, read: Callable[[Fields, str], N]) -> dict[str, N]:
    content = fields.object(name)
    values = Fields(fields.path, content, prefix=f"{name}.")
    for pattern in content:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"{fields.path}: {name}: {pattern!r}: {error}") from error
    return {pattern: read(values, pattern) for pattern in content}


def _matching(values: Mapping[str, N], module: str, default: N) -> N:
    """The value of the first pattern that matches the end of a module's path, as in PEFT."""
    for pattern, value in values.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
