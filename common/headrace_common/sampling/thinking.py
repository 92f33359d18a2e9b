"""How a model marks its reasoning, which is needed to limit it.

Imports only the standard library.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum

from ..structured.errors import SamplingError

MAX_MARKER_CHARS = 256


class ThinkingBegin(StrEnum):
    """Where an output begins: INSIDE reasoning, or before its opening marker (OPEN)."""

    INSIDE = "inside"
    OPEN = "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingFormat:
    """The markers of reasoning. Raises SamplingError.

    Reasoning stands once, at the output's beginning, between `opening` and `closing`. With `again`
    it may begin at any place until the text `answer` has come. `ending` is written if the tokens
    are used up: it begins with `closing`, and is that if it is empty. `begun` is text of the prompt
    that belongs to the opening marker.
    """

    opening: str
    closing: str
    ending: str = ""
    begin: ThinkingBegin = ThinkingBegin.OPEN
    begun: str = ""
    again: bool = False
    answer: str = ""

    def __post_init__(self) -> None:
        texts = (self.opening, self.closing, self.ending, self.begun, self.answer)
        for text in texts:
            if not isinstance(text, str) or len(text) > MAX_MARKER_CHARS:
                raise _wrong(f"its texts may have at most {MAX_MARKER_CHARS} characters")
        if not self.opening or not self.closing or not isinstance(self.again, bool):
            raise _wrong("give the markers opening and closing")
        if not self.ending:
            object.__setattr__(self, "ending", self.closing)
        if not self.ending.startswith(self.closing):
            raise _wrong("ending must begin with closing")

    def to_wire(self) -> dict[str, object]:
        return {**asdict(self), "begin": str(self.begin)}

    @classmethod
    def from_wire(cls, raw: object) -> "ThinkingFormat":
        """Inverse of to_wire. Raises SamplingError."""
        if not isinstance(raw, Mapping):
            raise _wrong("must be an object")
        try:
            return cls(**{**raw, "begin": ThinkingBegin(raw.get("begin", ""))})
        except (TypeError, ValueError) as error:
            raise _wrong(f"{error!s:.200}") from error


def _wrong(reason: str) -> SamplingError:
    return SamplingError("thinking_format", reason)
