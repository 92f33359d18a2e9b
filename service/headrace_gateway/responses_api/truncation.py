"""`truncation: auto`: of a conversation that is too long the first turns are left out.

A turn begins with what the user says, so that no result of a tool is without its call. System
messages at the beginning stay.
"""

from collections.abc import Awaitable, Callable, Sequence

from ..chat_messages import Message
from ..errors import TOO_LONG, ApiError

Encode = Callable[[Sequence[Message]], Awaitable[list[int]]]


async def fitting(messages: Sequence[Message], encode: Encode, room: int) -> list[int]:
    """The token ids of as many of the last turns as fit into `room` tokens; at least of the last.

    Raises ApiError as `encode` does, for the last turn too.
    """
    head, turns = _parts(messages)

    async def tried(first: int) -> list[int] | None:
        try:
            ids = await encode([*head, *messages[turns[first] :]])
        except ApiError as error:
            if error.code != TOO_LONG:
                raise
            return None
        return ids if len(ids) <= room else None

    found = await tried(0)
    if found is not None:
        return found
    low, high = 1, len(turns) - 1
    while low < high:
        middle = (low + high) // 2
        ids = await tried(middle)
        if ids is None:
            low = middle + 1
        else:
            found, high = ids, middle
    return await encode([*head, *messages[turns[high] :]]) if found is None else found


def _parts(messages: Sequence[Message]) -> tuple[Sequence[Message], list[int]]:
    """What always stays, and where each turn behind it begins."""
    first = 0
    while first < len(messages) and messages[first].role in ("system", "developer"):
        first += 1
    later = range(first + 1, len(messages))
    return messages[:first], [first, *(i for i in later if messages[i].role == "user")]
