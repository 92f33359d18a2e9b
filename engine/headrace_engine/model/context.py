"""How long a sequence a checkpoint can take, given how its rotary embedding is scaled."""

from ..errors import ConfigError
from .checkpoint import JsonObject


def pick_context(wanted: int | None, trained: int, rope_type: str, rope: JsonObject) -> int:
    """The context to serve: what was asked for, or what the checkpoint is made for.

    `trained` is max_position_embeddings. YaRN stretches the original context by its factor, whether
    or not max_position_embeddings says so; dynamic NTK can be stretched, but is exact without.

    Raises ConfigError for more than the checkpoint can take.
    """
    stretched = int(rope.get("original_max_position_embeddings", trained) * rope.get("factor", 1.0))
    default = max(trained, stretched) if rope_type == "yarn" else trained
    longest = int(trained * rope["factor"]) if rope_type == "dynamic" else default
    if wanted is not None and wanted > longest:
        raise ConfigError(
            f"max_model_len {wanted} is above the longest context of this checkpoint ({longest})"
        )
    return default if wanted is None else wanted
