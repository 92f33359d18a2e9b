"""The format that Harmony's messages must match: reasoning is free, and the last message is
constrained. Reasoning must not contain `<|`, since parsers could not distinguish that from its
end."""

from dataclasses import replace

from headrace_common.structured.structural_format import (
    Alternatives,
    AnyText,
    Concatenation,
    Const,
    Format,
    Repeat,
    Rules,
    Tag,
    Until,
)
from headrace_common.structured.structural_grammar import escaped

from ..tool_calls.constraint import CallConstraint, Function, sequence
from .header import CHANNEL, CONSTRAIN, END, ENDS, MESSAGE, NAMESPACE, START

_AUTHOR = f"{START}assistant"
_FINAL = f"{CHANNEL}final{MESSAGE}"
_UNMARKED = r"([^<]|<+[^<|])*<*"
_AN_END = "|".join(map(escaped, ENDS))
_KIND = Repeat(
    Alternatives(tuple(map(Const, (f" {CONSTRAIN}json", f"{CONSTRAIN}json", " json")))),
    optional=True,
    once=True,
)


def harmony_format(constraint: CallConstraint) -> Format:
    """Returns the format of a call, or, if calls are not forced, of an answer without calls."""
    ways: list[Format] = [*map(_call, constraint.functions)]
    if constraint.answer is not None:
        ways.append(Tag(_FINAL, constraint.answer))
    elif not constraint.forced:
        ways.append(Tag(_FINAL, AnyText(rf"(.|\n)*({_AN_END})")))
    return _behind_notes(Alternatives(tuple(ways)), preambles=True)


def final_format(content: Format) -> Format:
    """Returns the format of an answer with this content."""
    if isinstance(content, Rules):
        return replace(content, content=final_format(content.content))
    return _behind_notes(Tag(_FINAL, content), preambles=False)


def from_within(written: Format) -> Format:
    """Returns the rest of either format for a text that begins within an answer's content."""
    if isinstance(written, Rules):
        return replace(written, content=from_within(written.content))
    assert isinstance(written, Concatenation)
    last = written.elements[-1]
    ways = last.elements if isinstance(last, Alternatives) else (last,)
    for way in ways:
        if isinstance(way, Tag) and way.begin == _FINAL:
            return way.content
    return sequence(Const(END + _AUTHOR), *written.elements)


def _behind_notes(last: Format, *, preambles: bool) -> Format:
    """Puts messages of reasoning, and of text before calls, in front of `last`."""
    channels = [Const(f"{CHANNEL}analysis{MESSAGE}")]
    if preambles:
        channels.append(Const(f"{CHANNEL}commentary{MESSAGE}"))
    head = Alternatives(tuple(channels)) if len(channels) > 1 else channels[0]
    note = sequence(head, Until(END, _UNMARKED), Const(_AUTHOR))
    return sequence(Repeat(note, optional=True), last)


def _call(function: Function) -> Format:
    """Returns the format of a call. Its recipient follows the channel, or precedes it."""
    to, channel = f" to={NAMESPACE}{function.name}", f"{CHANNEL}commentary"
    head = Alternatives((Const(channel + to), Const(to + channel)))
    return sequence(head, _KIND, Const(MESSAGE), function.arguments)
