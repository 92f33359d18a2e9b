"""The arguments of an LLM: read from keywords, or from a command line as vLLM's examples do."""

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from types import MappingProxyType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from headrace_common.sampling.params import MAX_LOGPROBS
from headrace_common.text.checkpoint import DEMO_MODEL, local_source

from ..core.config import EngineConfig
from ..core.errors import ConfigError
from ..core.speculative_config import SpeculativeConfig
from .arguments import VALUES, VLLM_ARGUMENTS, Fixed, Ignored, Renamed

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_UNITS = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1024, "M": 1024**2, "G": 1024**3}


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineOptions:
    """Arguments of an LLM besides those of its engine.

    `tokenizer` is a folder or hub id; default: the model's. With `skip_tokenizer_init` there is no
    tokenizer, and prompts must be token ids. No prompt may ask for more log probabilities than
    `max_logprobs`. Default sampling parameters come from the checkpoint's generation_config.json,
    unless `generation_config` is "vllm", and from `override_generation_config`. `hf_overrides` are
    fields that replace those of config.json.
    """

    tokenizer: str | None = None
    tokenizer_revision: str | None = None
    skip_tokenizer_init: bool = False
    max_logprobs: int = MAX_LOGPROBS
    generation_config: Literal["auto", "vllm"] = "auto"
    override_generation_config: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    hf_overrides: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)

    def __post_init__(self) -> None:
        if not 0 <= self.max_logprobs <= MAX_LOGPROBS:
            raise ConfigError(f"max_logprobs must be 0 to {MAX_LOGPROBS}, not {self.max_logprobs}")
        if self.generation_config not in ("auto", "vllm"):
            raise ConfigError(
                f"generation_config must be auto or vllm, not {self.generation_config!r:.60}: put "
                "other values into override_generation_config"
            )
        if not isinstance(self.hf_overrides, Mapping):
            raise ConfigError("hf_overrides must be fields of config.json with their values")


class EngineArgs:
    """The arguments of an LLM under vLLM's names, as attributes. Raises ConfigError.

    See EngineConfig and OfflineOptions for those that change anything.
    """

    def __init__(self, model: str = DEMO_MODEL, **options: Any) -> None:
        self.model = model
        vars(self).update(options)
        self.read()

    def read(self) -> tuple[EngineConfig, OfflineOptions]:
        """The engine's configuration and the other options. Raises ConfigError."""
        given = dict(vars(self))
        model = local_source(given.pop("model"))
        known = _translated(given)
        own = {name: known.pop(name) for name in _names(OfflineOptions) if name in known}
        return EngineConfig(model=model, **known), OfflineOptions(**own)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds a flag for each argument; returns the parser."""
        for kind in (EngineConfig, OfflineOptions):
            hints = get_type_hints(kind)
            for one in own_fields(kind):
                parser.add_argument(_flag(one.name), **_cli_options(one, hints[one.name]))
        for name in VLLM_ARGUMENTS:
            parser.add_argument(
                _flag(name), nargs="?", const=True, type=_value, default=argparse.SUPPRESS
            )
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        """The arguments that a parser with `add_cli_args` has read; ignores others."""
        known = {*_names(EngineConfig), *_names(OfflineOptions), *VLLM_ARGUMENTS}
        return cls(**{name: value for name, value in vars(args).items() if name in known})


# vLLM's name of the arguments of an AsyncLLM.
AsyncEngineArgs = EngineArgs


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that reads `--max_model_len` as `--max-model-len`, as vLLM's does."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        import sys

        given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(list(map(_dashed, given)), namespace)


def _translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options under Headrace's names. Raises ConfigError for one that it does not have."""
    defaults = {**_defaults(EngineConfig), **_defaults(OfflineOptions)}
    known: dict[str, Any] = {}
    for name, value in given.items():
        match VLLM_ARGUMENTS.get(name):
            case Ignored():
                continue
            case Fixed(accepted, remedy):
                if not any(value is each or value == each for each in accepted) and value != {}:
                    raise ConfigError(f"{name}={value!r:.60} is not supported: {remedy}")
            case Renamed(to, values):
                known[to] = _named(values or VALUES.get(to, {}), value)
            case None if name in defaults:
                known.setdefault(name, _named(VALUES.get(name, {}), value))
            case None:
                raise ConfigError(_unknown(name, {*defaults, *VLLM_ARGUMENTS}))
    return {
        name: _converted(name, value)
        for name, value in known.items()
        if value is not None or defaults[name] is None
    }


def _converted(name: str, value: Any) -> Any:
    if name == "speculative_config" and isinstance(value, Mapping):
        return SpeculativeConfig.of(value)
    if name == "dtype":  # torch.float16 is accepted too
        return str(value).removeprefix("torch.")
    return value


def _named(values: Mapping[Any, Any], value: Any) -> Any:
    try:
        return values.get(value, value)
    except TypeError:  # not hashable
        return value


def _unknown(name: str, known: set[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"unknown option {name}; {hint}known are {', '.join(sorted(known))}"


def own_fields(kind: type[Any]) -> list[Field[Any]]:
    """The fields that are arguments of an LLM: not those that VLLM_ARGUMENTS restricts."""
    return [one for one in fields(kind) if one.name not in VLLM_ARGUMENTS]


def _names(kind: type[Any]) -> list[str]:
    return [one.name for one in own_fields(kind)]


def _defaults(kind: type[Any]) -> dict[str, Any]:
    return {
        one.name: one.default_factory() if one.default_factory is not MISSING else one.default
        for one in fields(kind)
        if one.name != "model"
    }


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _dashed(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def _cli_options(one: Any, hint: Any) -> dict[str, Any]:
    default = DEMO_MODEL if one.name == "model" else _defaults_of(one)
    if bool in (hint, *get_args(hint)) and str not in get_args(hint):
        return {"action": argparse.BooleanOptionalAction, "default": default}
    return {"type": _reader(hint), "default": default}


def _defaults_of(one: Any) -> Any:
    return one.default_factory() if one.default_factory is not MISSING else one.default


def _reader(hint: Any) -> Callable[[str], Any]:
    kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    for kind in kinds:
        if kind is int:
            return _whole
        if kind is float:
            return float
        if get_origin(kind) is not None and get_origin(kind) is not Literal:
            return json.loads
        if kind is SpeculativeConfig:
            return json.loads
    return str


def _whole(text: str) -> int:
    """A whole number, or vLLM's 1k (1000), 1K (1024) and so on."""
    found = re.fullmatch(r"([0-9.]+)([kmgKMG])", text)
    return int(text) if found is None else int(float(found[1]) * _UNITS[found[2]])


def _value(text: str) -> Any:
    """The value of a JSON text, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text
