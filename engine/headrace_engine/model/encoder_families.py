"""Encoders that can embed, by the `model_type` of their config.json, and how they differ.

Their tokens attend in both directions, so they write no text and keep no KV. Loads nothing.
"""

from dataclasses import dataclass

from .checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """`size_field` of config.json has the length of hidden states. With `counts_behind_padding` the
    first position is the one behind the padding token's id, so that there are fewer for tokens."""

    size_field: str = "hidden_size"
    counts_behind_padding: bool = False


ENCODERS: dict[str, EncoderFamily] = {
    "bert": EncoderFamily(),
    "camembert": EncoderFamily(counts_behind_padding=True),
    "distilbert": EncoderFamily(size_field="dim"),
    "electra": EncoderFamily(),
    "modernbert": EncoderFamily(),
    "mpnet": EncoderFamily(counts_behind_padding=True),
    "roberta": EncoderFamily(counts_behind_padding=True),
    "xlm-roberta": EncoderFamily(counts_behind_padding=True),
}


def encoder_family(checkpoint: Checkpoint) -> EncoderFamily | None:
    """None for a model that is no known encoder, or one that was trained as a decoder."""
    if checkpoint.config.get("is_decoder"):
        return None
    return ENCODERS.get(str(checkpoint.config.get("model_type")))
