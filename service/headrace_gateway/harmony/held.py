"""Harmony's messages as a text must match them: reasoning is free, what comes last is held.

Texts with `<|` in them are no reasoning here: readers could not tell them from its end.
"""

from dataclasses import replace

from headrace_common.structural_format import (
    AnyText,
    Choice,
    Const,
    Format,
    Repeat,
    Rules,
    Sequence,
    Tag,
    Until,
)
from headrace_common.structural_grammar import escaped

from ..tool_calls.held import Function, Held, sequence
from .header import CHANNEL, CONSTRAIN, END, ENDS, MESSAGE, NAMESPACE, START

_AUTHOR = f"{START}assistant"
_FINAL = f"{CHANNEL}final{MESSAGE}"
_UNMARKED = r"([^<]|<+[^<|])*<*"
_AN_END = "|".join(map(escaped, ENDS))
_KIND = Repeat(
    Choice(tuple(map(Const, (f" {CONSTRAIN}json", f"{CONSTRAIN}json", " json")))),
    optional=True,
    once=True,
)


def harmony_format(held: Held) -> Format:
    """A call, or an answer that has none in it where calls are not forced."""
    ways: list[Format] = [*map(_call, held.functions)]
    if held.answer is not None:
        ways.append(Tag(_FINAL, held.answer))
    elif not held.forced:
        ways.append(Tag(_FINAL, AnyText(rf"(.|\n)*({_AN_END})")))
    return _behind_notes(Choice(tuple(ways)), preambles=True)


def final_format(content: Format) -> Format:
    """An answer with this content."""
    if isinstance(content, Rules):
        return replace(content, content=final_format(content.content))
    return _behind_notes(Tag(_FINAL, content), preambles=False)


def from_within(written: Format) -> Format:
    """What either of the two leaves for a text that begins within an answer's content."""
    if isinstance(written, Rules):
        return replace(written, content=from_within(written.content))
    assert isinstance(written, Sequence)
    last = written.elements[-1]
    ways = last.elements if isinstance(last, Choice) else (last,)
    for way in ways:
        if isinstance(way, Tag) and way.begin == _FINAL:
            return way.content
    return sequence(Const(END + _AUTHOR), *written.elements)


def _behind_notes(last: Format, *, preambles: bool) -> Format:
    """`last` behind messages of reasoning, or of what is said before calls."""
    channels = [Const(f"{CHANNEL}analysis{MESSAGE}")]
    if preambles:
        channels.append(Const(f"{CHANNEL}commentary{MESSAGE}"))
    head = Choice(tuple(channels)) if len(channels) > 1 else channels[0]
    note = sequence(head, Until(END, _UNMARKED), Const(_AUTHOR))
    return sequence(Repeat(note, optional=True), last)


def _call(function: Function) -> Format:
    """Its recipient stands behind the channel, or before it."""
    to, channel = f" to={NAMESPACE}{function.name}", f"{CHANNEL}commentary"
    head = Choice((Const(channel + to), Const(to + channel)))
    return sequence(head, _KIND, Const(MESSAGE), function.arguments)
