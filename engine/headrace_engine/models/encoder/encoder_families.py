"""Encoders that can embed, by the `model_type` of their config.json, and how they differ.

Their tokens attend in both directions, so they generate no text and keep no KV.
"""

from dataclasses import dataclass

from ...checkpoints.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """One family.

    `size_field` of config.json has the length of hidden states. With `counts_after_padding` the
    first position is the padding token's id + 1, so a text can have fewer tokens.
    """

    size_field: str = "hidden_size"
    counts_after_padding: bool = False


ENCODERS: dict[str, EncoderFamily] = {
    "bert": EncoderFamily(),
    "camembert": EncoderFamily(counts_after_padding=True),
    "distilbert": EncoderFamily(size_field="dim"),
    "electra": EncoderFamily(),
    "modernbert": EncoderFamily(),
    "mpnet": EncoderFamily(counts_after_padding=True),
    "roberta": EncoderFamily(counts_after_padding=True),
    "xlm-roberta": EncoderFamily(counts_after_padding=True),
}


def encoder_family(checkpoint: Checkpoint) -> EncoderFamily | None:
    """The family; None if the model is not a known encoder, or was trained as a decoder."""
    if checkpoint.config.get("is_decoder"):
        return None
    return ENCODERS.get(str(checkpoint.config.get("model_type")))
