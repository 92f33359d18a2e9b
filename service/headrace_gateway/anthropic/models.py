"""Models as Anthropic's clients list them, page by page."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from ..errors import invalid
from ..models.models import ServedModel


def model_info(model: ServedModel, context: int | None) -> dict[str, Any]:
    """Returns one model; `context` is prompt plus output in tokens, None if it is not known."""
    created = datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": created,
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


def page_of(
    models: Sequence[ServedModel], *, limit: int, after: str | None, before: str | None
) -> tuple[Sequence[ServedModel], bool]:
    """Returns at most `limit` models after one, or before another, and whether there are more.

    Raises ApiError.
    """
    names = [model.name for model in models]
    if before is not None:
        end = _place(names, before, "before_id")
        return models[max(0, end - limit) : end], end > limit
    begin = 0 if after is None else _place(names, after, "after_id") + 1
    return models[begin : begin + limit], begin + limit < len(models)


def listed(infos: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Returns a page of models."""
    return {
        "data": list(infos),
        "first_id": infos[0]["id"] if infos else None,
        "last_id": infos[-1]["id"] if infos else None,
        "has_more": has_more,
    }


def _place(names: Sequence[str], name: str, parameter: str) -> int:
    if name not in names:
        raise invalid(f"{parameter}: no model of this name is served here.", param=parameter)
    return names.index(name)
