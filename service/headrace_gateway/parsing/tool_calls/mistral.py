"""Mistral's two formats after `[TOOL_CALLS]`: an array of objects, or `f{...}` for each call.

The newer tokenizers write `[TOOL_CALLS]f[ARGS]{...}`, with or without `[CALL_ID]...` before
`[ARGS]`.
"""

import re

from headrace_common.structured.structural_format import Const, Format, Pattern, Tag

from ..parts import PartList
from .arrays import array_format
from .call_array import CallArray
from .call_object import Status
from .constraint import CallConstraint, Function, sequence
from .named_call import NAME, NamedCall
from .scanning import skip_space

MARKER, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_HEAD = re.compile(rf"\s*({NAME})\s*(?:\[CALL_ID\]\w{{1,64}})?(?:\[ARGS\])?\s*", re.ASCII)
_NAME_START = re.compile(r"\w", re.ASCII)


class MistralBody:
    """A Body that chooses between the two formats by the first character."""

    def __init__(self, parts: PartList) -> None:
        self._parts = parts
        self._space = ""
        self._form: CallArray | NamedCall | None = None

    @property
    def status(self) -> Status:
        return Status.OPEN if self._form is None else self._form.status

    @property
    def committed(self) -> bool:
        return self._form is not None and self._form.committed

    @property
    def raw(self) -> str:
        return self._space + ("" if self._form is None else self._form.raw)

    def push(self, text: str) -> str:
        if self._form is None:
            position = skip_space(text, 0)
            self._space += text[:position]
            text = text[position:]
            if not text:
                return ""
            named = _NAME_START.match(text) is not None
            self._form = NamedCall(self._parts, _HEAD) if named else CallArray(self._parts)
        return self._form.push(text)


def mistral_format(constraint: CallConstraint) -> Format:
    """Returns the format that the model's template writes."""
    if ARGS not in constraint.template:
        return array_format(constraint, MARKER)

    def tag(function: Function) -> Tag:
        if CALL_ID not in constraint.template:
            return Tag(f"{MARKER}{function.name}{ARGS}", function.arguments)
        after_id = sequence(Pattern("[A-Za-z0-9]{9}"), Const(ARGS), function.arguments)
        return Tag(f"{MARKER}{function.name}{CALL_ID}", after_id)

    return constraint.tagged(MARKER, [*map(tag, constraint.functions)])
