"""SamplingParams of the offline API: mutable, with the fields that only vLLM has."""

import copy
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from headrace_common.sampling import params as common
from headrace_common.sampling.params import SamplingError
from headrace_common.structured.structured import StructuredOutputsParams

# Fields for which None means the default, as in vLLM.
_NONE_IS_DEFAULT: dict[str, Any] = {
    "stop": (),
    "stop_token_ids": (),
    "bad_words": (),
    "logit_bias": {},
}


class RequestOutputKind(Enum):
    """What `LLMEngine.step` and `AsyncLLM.generate` return of a request that is not finished.

    CUMULATIVE: everything so far. DELTA: what is new. FINAL_ONLY: nothing until it is finished.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfflineFields(common.SamplingParams):
    detokenize: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    guided_decoding: StructuredOutputsParams | None = None
    logits_processors: Any = None
    extra_args: Any = None


# The name that Python puts into errors about arguments.
_OfflineFields.__init__.__qualname__ = "SamplingParams.__init__"


class SamplingParams(_OfflineFields):
    """Sampling parameters of one prompt. They can be changed; each change is checked.

    `detokenize` False leaves the outputs' texts empty. `truncate_prompt_tokens` k keeps the last k
    tokens of the prompt, -1 those that leave room for `max_tokens`. `output_kind` is for LLMEngine
    and AsyncLLM. `guided_decoding` is the older name of `structured_outputs`.
    `spaces_between_special_tokens` has no effect: tokenizers here never add such spaces.
    `logits_processors` and `extra_args` are refused.

    Raises SamplingError.
    """

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # it can change

    def __post_init__(self) -> None:
        for name, default in _NONE_IS_DEFAULT.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if self.seed == -1:  # means "no seed" in vLLM, too
            object.__setattr__(self, "seed", None)
        self._join_guided()
        structured = self.structured_outputs
        if structured is not None and not isinstance(structured, StructuredOutputsParams):
            raise SamplingError(
                "structured_outputs", f"must be StructuredOutputsParams, not {structured!r:.60}"
            )
        super().__post_init__()
        for name, remedy in UNSUPPORTED_SAMPLING.items():
            if getattr(self, name):
                raise SamplingError(name, f"is not supported: {remedy}")
        cut = self.truncate_prompt_tokens
        if cut is not None and (type(cut) is not int or not (cut == -1 or cut > 0)):
            raise SamplingError(
                "truncate_prompt_tokens", f"must be above 0, or -1, not {cut!r:.60}"
            )
        if not isinstance(self.output_kind, RequestOutputKind):
            raise SamplingError(
                "output_kind", f"must be a RequestOutputKind, not {self.output_kind!r:.60}"
            )
        if not self.detokenize and self.stop:
            raise SamplingError(
                "stop", "needs the text: leave detokenize on, or use stop_token_ids"
            )

    def _join_guided(self) -> None:
        if self.guided_decoding is None:
            return
        if self.structured_outputs is not None:
            raise SamplingError(
                "guided_decoding", "is the older name of structured_outputs: give only one"
            )
        object.__setattr__(self, "structured_outputs", self.guided_decoding)
        object.__setattr__(self, "guided_decoding", None)

    def __setattr__(self, name: str, value: Any) -> None:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        if name not in values:
            raise AttributeError(f"SamplingParams has no field {name!r}")
        checked = SamplingParams(**{**values, name: value})
        for one in values:
            object.__setattr__(self, one, getattr(checked, one))

    def clone(self) -> "SamplingParams":
        """A copy: changing one does not change the other."""
        return copy.copy(self)

    def for_request(self) -> common.SamplingParams:
        """A copy with the fields that the engine uses."""
        return common.SamplingParams(
            **{one.name: getattr(self, one.name) for one in fields(common.SamplingParams)}
        )


# Fields that vLLM has and Headrace refuses, with what to use.
UNSUPPORTED_SAMPLING = {
    "logits_processors": "use logit_bias, allowed_token_ids, bad_words or structured_outputs",
    "extra_args": "no plug-in would read it; leave it out",
}


def as_offline(params: common.SamplingParams) -> SamplingParams:
    """The same parameters, with the fields that only the offline API has at their defaults."""
    if isinstance(params, SamplingParams):
        return params
    return SamplingParams(**{one.name: getattr(params, one.name) for one in fields(params)})
