"""Types for fields of request bodies that bound the cost of a wrong value."""

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import FailFast, Field, StrictStr, StringConstraints

from .budget import Budget

Item = TypeVar("Item")
NAME_CHARS = 1024


class _FirstFault(FailFast):
    """A FailFast that can be a part of a union's type."""

    def __hash__(self) -> int:
        return hash(type(self))


@dataclass(frozen=True, slots=True)
class BoundedBy:
    """Marks a text type whose length `what` bounds; checks that every field is bounded read it."""

    what: str


# A list type that is refused at the first wrong item; the field adds its own max_length.
Items = Annotated[list[Item], _FirstFault()]
# A text that a model reads: as long as the body may be.
Text = Annotated[StrictStr, BoundedBy("the body")]
# Names, ids and similar texts.
Name = Annotated[str, StringConstraints(strict=True, max_length=NAME_CHARS)]
# An object whose members are not known here, such as a JSON schema.
FreeObject = Annotated[dict[str, Any], Field(max_length=Budget.members_per_object)]
