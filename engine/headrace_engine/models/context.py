"""The longest context of a checkpoint, given the scaling of its rotary embedding."""

from ..checkpoints.checkpoint import JsonObject
from ..core.errors import ContextTooLong


def pick_context(wanted: int | None, trained: int, rope_type: str, rope: JsonObject) -> int:
    """The context to serve: the wanted one, or the one that the checkpoint was trained for.

    `trained` is max_position_embeddings. YaRN extends the original context by its factor, even if
    max_position_embeddings does not say so; dynamic NTK can be extended, but is exact only without.

    Raises ContextTooLong for more than the checkpoint supports.
    """
    stretched = int(rope.get("original_max_position_embeddings", trained) * rope.get("factor", 1.0))
    default = max(trained, stretched) if rope_type == "yarn" else trained
    longest = int(trained * rope["factor"]) if rope_type == "dynamic" else default
    if wanted is not None and wanted > longest:
        raise ContextTooLong(
            f"max_model_len {wanted} is above the longest context of this checkpoint ({longest}): "
            "set at most that"
        )
    return default if wanted is None else wanted
