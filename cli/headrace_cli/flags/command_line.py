"""Reads the words of a command line as flags. The caller says which flags exist.

Words follow argparse: `--name value`, `--name=value`, and switches as `--name` or `--no-name`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from ..errors import UsageError
from .flag import Arity, Flag, option

_SLIP = 0.7  # the similarity from which a name counts as a misspelling
_NO = "no_"


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The flags in their order, and the words that belong to none."""

    flags: tuple[Flag, ...]
    words: tuple[str, ...]


def read_words(words: Sequence[str], known: Mapping[str, Arity]) -> CommandLine:
    """Reads words as flags.

    Raises UsageError for an unknown flag, and for a missing or superfluous value.
    """
    flags: list[Flag] = []
    loose: list[str] = []
    left = [word for word in words if word != "--"]
    while left:
        word = left.pop(0)
        if not _is_flag(word):
            loose.append(word)
            continue
        typed, equals, own = word.partition("=")
        name, arity = _known(typed, known)
        if arity is Arity.SWITCH:
            flags.append(_switch(typed, name, own if equals else "true"))
            continue
        values = [own] if equals else _values(left, arity)
        if not values:
            raise UsageError(f"{typed} needs a value", f"give one, as {typed} VALUE")
        flags += [Flag(name, value, typed) for value in values]
    return CommandLine(tuple(flags), tuple(loose))


def _is_flag(word: str) -> bool:
    return word.startswith("-") and word != "-" and not word[1:2].isdigit()


def _known(typed: str, known: Mapping[str, Arity]) -> tuple[str, Arity]:
    """A flag's name and how many values it has; --no-NAME belongs to the switch NAME."""
    name = typed.lstrip("-").replace("-", "_")
    positive = name.removeprefix(_NO)
    if name not in known and known.get(positive) is Arity.SWITCH:
        return name, Arity.SWITCH
    if name not in known:
        close = get_close_matches(name, known, n=1, cutoff=_SLIP)
        raise UsageError(
            f"there is no flag {typed}", f"did you mean {option(close[0])}?" if close else ""
        )
    return name, known[name]


def _switch(typed: str, name: str, value: str) -> Flag:
    if value.lower() not in ("true", "false"):
        raise UsageError(f"{typed} {value}: not true or false", f"give {typed} alone")
    positive = name.removeprefix(_NO) if typed.startswith("--no-") else name
    on = (value.lower() == "true") is (positive == name)
    return Flag(positive, str(on).lower(), typed)


def _values(left: list[str], arity: Arity) -> list[str]:
    """Takes the words that are values off `left`."""
    most = len(left) if arity is Arity.MANY else 1
    found: list[str] = []
    while left and len(found) < most and not _is_flag(left[0]):
        found.append(left.pop(0))
    return found
