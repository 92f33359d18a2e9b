"""Tours of the API by its clients' libraries, each a program of its own: `python -m ... URL`.

They run outside the tests' process, since some of these libraries take seconds to import, warn, and
change process-wide state.
"""

from typing import Any

CHAT, EMBEDDER = "tiny", "embedder"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
HELLO = "Hello!"
MAX_TOKENS = 64


def check_place(found: Any) -> None:
    """Checks an answer that was requested with SCHEMA."""
    assert set(found) == {"city", "days"}, found
    assert found["city"] in ("Paris", "Rome") and found["days"] in (1, 2, 3), found
