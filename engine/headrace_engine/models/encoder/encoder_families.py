"""Encoders that can embed, by the `model_type` of their config.json, and how they differ.

Their tokens attend in both directions, so they generate no text and keep no KV.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...checkpoints.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """One family.

    `size_field` of config.json has the length of hidden states. With `counts_after_padding` the
    first position is the padding token's id + 1, so a text can have fewer tokens. A `dual` one
    embeds texts and images; vectors have `size` numbers if config.json does not say. With `padded`
    texts are padded to all positions. One `of_tokens` makes a vector for each token.
    """

    size_field: str = "hidden_size"
    counts_after_padding: bool = False
    dual: bool = False
    padded: bool = False
    of_tokens: bool = False
    size: int | None = None

    def vector_size(self, config: Mapping[str, Any]) -> object:
        """The length of vectors, as config.json says."""
        if not self.padded:
            return config.get(self.size_field, self.size)
        text = config.get("text_config") or {}
        return text.get(self.size_field) or text.get("hidden_size", self.size)


ENCODERS: dict[str, EncoderFamily] = {
    "bert": EncoderFamily(),
    "clip": EncoderFamily(size_field="projection_dim", dual=True, size=512),
    "colpali": EncoderFamily(of_tokens=True),
    "camembert": EncoderFamily(counts_after_padding=True),
    "distilbert": EncoderFamily(size_field="dim"),
    "electra": EncoderFamily(),
    "modernbert": EncoderFamily(),
    "mpnet": EncoderFamily(counts_after_padding=True),
    "roberta": EncoderFamily(counts_after_padding=True),
    "siglip": EncoderFamily(size_field="projection_size", dual=True, padded=True, size=768),
    "xlm-roberta": EncoderFamily(counts_after_padding=True),
}


def encoder_family(checkpoint: Checkpoint) -> EncoderFamily | None:
    """The family; None if the model is not a known encoder, or was trained as a decoder."""
    if checkpoint.config.get("is_decoder"):
        return None
    return ENCODERS.get(str(checkpoint.config.get("model_type")))
