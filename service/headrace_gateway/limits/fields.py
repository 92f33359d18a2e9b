"""Types for fields of request bodies that bound what one wrong value can cost."""

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import FailFast, Field, StrictStr, StringConstraints

from .budget import Budget

Item = TypeVar("Item")
NAME_CHARS = 1024


class _FirstFault(FailFast):
    """FailFast that can be a part of a union's type."""

    def __hash__(self) -> int:
        return hash(type(self))


@dataclass(frozen=True, slots=True)
class BoundedBy:
    """Says of a text that it is as long as `what` allows, for who looks for bounds."""

    what: str


# A list that is refused at its first wrong item; the field adds its own max_length.
Items = Annotated[list[Item], _FirstFault()]
# What is read by a model: as long as the body may be.
Text = Annotated[StrictStr, BoundedBy("the body")]
# Names, ids and the like.
Name = Annotated[str, StringConstraints(strict=True, max_length=NAME_CHARS)]
# An object whose members are not known here, such as a JSON schema.
FreeObject = Annotated[dict[str, Any], Field(max_length=Budget.members_of_one)]
