"""Lists in the form of OpenAI's API, page by page."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ...errors import invalid

Item = TypeVar("Item")


def page(
    items: Sequence[Item],
    name: Callable[[Item], str],
    body: Callable[[Item], dict[str, Any]],
    *,
    after: str | None,
    limit: int,
) -> dict[str, Any]:
    """Returns one page of a list, after the item that `after` names. Raises ApiError."""
    names = [name(item) for item in items]
    if after is not None and after not in names:
        raise invalid(f"after: there is no {after[:80]!r} in this list.", param="after")
    start = 0 if after is None else names.index(after) + 1
    shown = items[start : start + limit]
    return {
        "object": "list",
        "data": [body(item) for item in shown],
        "first_id": name(shown[0]) if shown else None,
        "last_id": name(shown[-1]) if shown else None,
        "has_more": start + limit < len(items),
    }
