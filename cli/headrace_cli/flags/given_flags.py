"""The flags of a command line and of its --config file, as Headrace's own."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .command_line import read_words
from .config_file import config_words
from .flag import Arity, Flag
from .vllm import arities, translated

_CONFIG = "config"
_NAME = "served_model_name"


@dataclass(frozen=True, slots=True)
class GivenFlags:
    """The flags, the words that belong to none, and sentences about flags without effect."""

    flags: tuple[Flag, ...]
    words: tuple[str, ...]
    notes: tuple[str, ...]


def given_flags(words: Sequence[str], known: Mapping[str, Arity]) -> GivenFlags:
    """Reads the words; the command line overrides the file.

    Raises UsageError. `known` are Headrace's flags; vLLM's are understood too.
    """
    every = {**arities(), **known, _CONFIG: Arity.ONE, _NAME: Arity.MANY}
    line = read_words(words, every)
    files = [Path(flag.value) for flag in line.flags if flag.name == _CONFIG]
    in_files = [word for file in files for word in config_words(file)]
    first = translated(read_words(in_files, every).flags)
    last = translated([flag for flag in line.flags if flag.name != _CONFIG])
    overridden = {flag.name for flag in last.flags}
    if line.words:
        overridden.add("model")
    flags = [*(flag for flag in first.flags if flag.name not in overridden), *last.flags]
    return GivenFlags(tuple(_one_name(flags)), line.words, (*first.notes, *last.notes))


def _one_name(flags: Sequence[Flag]) -> list[Flag]:
    """The flags with one served name. Answers have the first name, so the others become aliases."""
    names = [flag for flag in flags if flag.name == _NAME]
    aliases = {flag.value: names[0].value for flag in names[1:]}
    rest = [flag for flag in flags if flag.name != _NAME]
    if aliases:
        rest.append(Flag("model_aliases", json.dumps(aliases), f"a second {names[1].typed}"))
    return [*names[:1], *rest]
