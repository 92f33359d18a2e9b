"""Tours of the API by its clients' libraries, each a program of its own: `python -m ... URL`.

Apart from the tests' process, since some of these libraries take seconds to import, warn, and
change what belongs to the whole process.
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
    """Checks an answer that was asked for with SCHEMA."""
    assert set(found) == {"city", "days"}, found
    assert found["city"] in ("Paris", "Rome") and found["days"] in (1, 2, 3), found
