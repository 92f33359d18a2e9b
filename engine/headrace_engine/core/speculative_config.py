"""Configuration of speculative decoding; its fields are named as vLLM's `speculative_config`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from headrace_common.text.checkpoint import local_source

from .errors import ConfigError

Method = Literal["ngram", "draft_model", "mtp", "eagle3"]
METHODS = ("ngram", "draft_model", "mtp", "eagle3")
# Methods that name a checkpoint.
_WITH_MODEL = ("draft_model", "eagle3")
# Layers are trained to predict one token further, and the next ones from their own states.
MTP_TOKENS = 1
MOST_TOKENS = 64
LOOKUP_MAX, LOOKUP_MIN = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are proposed, and how many.

    `ngram` looks for an earlier occurrence of the last `prompt_lookup_max` tokens (or fewer, down
    to `prompt_lookup_min`) in prompt and output, and proposes what followed it. `draft_model` runs
    `model`, a smaller checkpoint with the same vocabulary. `mtp` runs the layer of the target's own
    checkpoint that predicts a further token, `eagle3` the one-layer head in `model`; both read the
    target's hidden states.

    At most `num_speculative_tokens` tokens are proposed at once. If `adaptive`, measured costs
    decide how many. With more than `disable_by_batch_size` decoding sequences nothing is proposed;
    None sets no such limit. `revision`, `quantization` and `max_model_len` are the draft model's;
    `eagle3` has the first two, `mtp` none of them.
    """

    method: Method
    num_speculative_tokens: int = 5
    prompt_lookup_max: int = LOOKUP_MAX
    prompt_lookup_min: int = LOOKUP_MIN
    model: str | None = None
    revision: str | None = None
    quantization: Literal["none", "int8"] = "none"
    max_model_len: int | None = None
    disable_by_batch_size: int | None = None
    adaptive: bool = True

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "SpeculativeConfig":
        """Reads a JSON object, such as `--speculative-config`. Raises ConfigError naming the field.

        As in vLLM, `method` defaults to `draft_model` if a model is named, else to `ngram`;
        `mtp` proposes one token, and names of families that end in `_mtp` mean the same. If only
        one lookup length is given, the other one's default is adjusted to it.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise _error(unknown[0], f"no field: it has {', '.join(sorted(known))}")
        given = {name: value for name, value in values.items() if value is not None}
        given.setdefault("method", "draft_model" if "model" in given else "ngram")
        _check_types(given)
        if given["method"].endswith("_mtp"):
            given["method"] = "mtp"
        if given["method"] == "mtp":
            given.setdefault("num_speculative_tokens", MTP_TOKENS)
        if "model" in given:
            given["model"] = local_source(given["model"])
        most, least = given.get("prompt_lookup_max"), given.get("prompt_lookup_min")
        if most is None and least is not None:
            given["prompt_lookup_max"] = max(least, LOOKUP_MAX)
        if least is None and most is not None:
            given["prompt_lookup_min"] = min(most, LOOKUP_MIN)
        return cls(**given)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise _error("method", f"one of {', '.join(METHODS)}, not {self.method!r}")
        if (self.method in _WITH_MODEL) != (self.model is not None):
            raise _error("model", "given with methods draft_model and eagle3, and only with those")
        if not 1 <= self.num_speculative_tokens <= MOST_TOKENS:
            raise _error("num_speculative_tokens", f"1 to {MOST_TOKENS}")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise _error("prompt_lookup_min", "at least 1 and at most prompt_lookup_max")
        if self.quantization not in ("none", "int8"):
            raise _error("quantization", f"none or int8, not {self.quantization!r}")
        if self.has_head and self.max_model_len is not None:
            raise _error("max_model_len", f"left out with method {self.method}")
        if self.method == "mtp" and self.quantization != "none":
            raise _error("quantization", "left out with method mtp: it is the model's")
        for name in ("disable_by_batch_size", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise _error(name, f"at least 1, not {value}")

    @property
    def has_head(self) -> bool:
        """Whether a head proposes drafts that reads the target's hidden states."""
        return self.method in ("mtp", "eagle3")


_TYPES: dict[str, type] = {
    "method": str,
    "model": str,
    "revision": str,
    "quantization": str,
    "adaptive": bool,
}


def _check_types(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        wanted = _TYPES.get(name, int)
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            raise _error(name, f"of type {wanted.__name__}, not {value!r:.80}")


def _error(name: str, wanted: str) -> ConfigError:
    return ConfigError(f"speculative_config.{name} must be {wanted}")
