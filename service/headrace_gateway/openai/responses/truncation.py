"""`truncation: auto`: leaves out the first turns of a conversation that is too long.

A turn begins with a user's message, so that no tool result is left without its call. System
messages at the beginning stay.
"""

from collections.abc import Awaitable, Callable, Sequence, Sized
from typing import TypeVar

from ...errors import TOO_LONG, ApiError
from ...schemas.chat_messages import Message

Prompt = TypeVar("Prompt", bound=Sized)
Encode = Callable[[Sequence[Message]], Awaitable[Prompt]]


async def fitting(messages: Sequence[Message], encode: Encode[Prompt], max_tokens: int) -> Prompt:
    """Returns the prompt of the last turns that fit into `max_tokens`, at least of the last one.

    Raises ApiError as `encode` does, also for the last turn.
    """
    head, turns = _parts(messages)

    async def tried(first: int) -> Prompt | None:
        try:
            ids = await encode([*head, *messages[turns[first] :]])
        except ApiError as error:
            if error.code != TOO_LONG:
                raise
            return None
        return ids if len(ids) <= max_tokens else None

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
    """Returns the messages that always stay, and where each later turn begins."""
    first = 0
    while first < len(messages) and messages[first].role in ("system", "developer"):
        first += 1
    later = range(first + 1, len(messages))
    return messages[:first], [first, *(i for i in later if messages[i].role == "user")]
