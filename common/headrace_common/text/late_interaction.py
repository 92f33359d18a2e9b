"""Models of late interaction (ColPali, ColQwen2): what they read of a text and of an image.

They make a vector for each token. A query's score for a document is the sum, over the query's
vectors, of the largest product with a vector of the document (MaxSim).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..sampling.pooling import MAX_EMBEDDING_SIZE
from .checkpoint import PROCESSOR_FILE, CheckpointFiles
from .errors import TokenizerError

_SIZE = 128
# Tokens that queries are extended by.
_PADDING = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LateInteraction:
    """What a model of late interaction reads. Its vectors have `size` numbers.

    A text is a query: it is between `query_prefix` and `query_suffix`. The prompt of an image is
    `image_prompt`, with one placeholder.
    """

    size: int
    query_prefix: str
    query_suffix: str
    image_prompt: str

    def query(self, text: str) -> str:
        """The prompt of a text."""
        return f"{self.query_prefix}{text}{self.query_suffix}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What transformers' processor uses where processor_config.json leaves it out. With `begins`
    prompts begin with the tokenizer's first token, after the placeholder `image` of an image, and
    end with a line break."""

    query_prefix: str
    image_prompt: str
    begins: bool = False
    image: str = ""


# By the model_type of config.json.
_FAMILIES = {
    "colpali": _Family(
        query_prefix="Question: ", image_prompt="Describe the image.", begins=True, image="<image>"
    ),
    "colqwen2": _Family(
        query_prefix="Query: ",
        image_prompt="<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
        "Describe the image.<|im_end|><|endoftext|>",
    ),
}


def token_vector_size(config: Mapping[str, Any]) -> int | None:
    """How many numbers the vector of each token has, by config.json; None for another kind of
    model. Raises TokenizerError."""
    if config.get("model_type") not in _FAMILIES:
        return None
    size = config.get("embedding_dim", _SIZE)
    if type(size) is not int or not 0 < size <= MAX_EMBEDDING_SIZE:
        raise TokenizerError(
            f"config.json: embedding_dim must be a whole number from 1 to {MAX_EMBEDDING_SIZE}, "
            f"not {size!r:.40}"
        )
    return size


def read_late_interaction(files: CheckpointFiles) -> LateInteraction | None:
    """Reads a checkpoint's files; None for another kind of model. Raises TokenizerError for a field
    that has no meaning."""
    config, processor = files.json("config.json"), files.json(PROCESSOR_FILE)
    size = token_vector_size(config)
    if size is None:
        return None
    family = _FAMILIES[config["model_type"]]
    prefix = _text(files, processor, "query_prefix", family.query_prefix)
    image = _text(files, processor, "visual_prompt_prefix", family.image_prompt)
    if family.begins:
        first = _token(files, "bos_token")
        prefix, image = first + prefix, f"{family.image}{first}{image}\n"
    return LateInteraction(
        size=size,
        query_prefix=prefix,
        query_suffix=_token(files, "pad_token") * _PADDING + "\n",
        image_prompt=image,
    )


def _text(files: CheckpointFiles, processor: Mapping[str, Any], name: str, default: str) -> str:
    value = processor.get(name) or default
    if not isinstance(value, str):
        raise TokenizerError(
            f"{files.origin}/{PROCESSOR_FILE}: {name} must be a text, not {value!r:.40}"
        )
    return value


def _token(files: CheckpointFiles, kind: str) -> str:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        found = files.json(name).get(kind)
        token = found.get("content") if isinstance(found, dict) else found
        if isinstance(token, str):
            return token
    raise TokenizerError(
        f"{files.origin}/tokenizer_config.json: a {kind} is missing, which prompts need"
    )
