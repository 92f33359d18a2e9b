"""Ids of a resumable stream's events, by which a stream continues after the last event that its
client has.

An id is `<request id>:<events of choice 0>.<of choice 1>...-<checksum>`. The events of a choice
follow from its tokens alone, so any gateway makes the same events again and leaves out those that
the id counts. The checksum is over the tokens of these events. If it differs, the answer is another
one now, and the client gets an error instead of its rest.
"""

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace_common.wire.messages import pack_tokens

from ..errors import NO_RETRY, ApiError, invalid
from ..queue_client.run import Piece
from ..streaming.sse import event

REQUEST_ID = re.compile(r"[0-9a-f]{32}")
MAX_EVENT_ID_CHARS = 65_536
_EVENT_ID = re.compile(r"([0-9a-f]{32}):(\d{1,9}(?:\.\d{1,9})*)-([0-9a-f]{8})")

Chunk = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Position:
    """Where a client's stream broke off: the number of events that it has of each choice.

    `checksum` None: not checked, as for `starting_after`. Events after the last choice's end are
    counted like those of one more choice.
    """

    events: tuple[int, ...]
    checksum: int | None = None


START = Position((), None)


def parse_event_id(text: str, request_id: str) -> Position:
    """Returns the position in an event id of this request. Raises ApiError."""
    found = _EVENT_ID.fullmatch(text) if len(text) <= MAX_EVENT_ID_CHARS else None
    if found is None:
        raise invalid(
            "Last-Event-ID: must be the id of an event of a resumable stream, as it was received.",
            param="Last-Event-ID",
            code="invalid_event_id",
        )
    if found[1] != request_id:
        raise invalid(
            "Last-Event-ID: belongs to another request; its first part is that request's id.",
            param="Last-Event-ID",
            code="invalid_event_id",
        )
    return Position(tuple(map(int, found[2].split("."))), int(found[3], 16))


def parse_position(text: str) -> Position:
    """Returns the position in a stream of one choice from its number of events. Raises ApiError."""
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise _not_a_count()
    return Position((int(text),))


def _not_a_count() -> ApiError:
    return invalid(
        "starting_after: must be the number of events that you have; with several "
        "choices, send the last event's id as Last-Event-ID.",
        param="starting_after",
    )


def check_position(had: Position, choices: int) -> None:
    """Raises ApiError for a position that an answer of `choices` choices cannot have."""
    if had.events and not choices <= len(had.events) <= choices + 1:
        if had.checksum is None:
            raise _not_a_count()
        raise invalid(
            f"Last-Event-ID: names {len(had.events)} choices, but the request has {choices}.",
            param="Last-Event-ID",
            code="invalid_event_id",
        )


def request_of(event_id: str) -> str | None:
    """Returns the request that an event id names, or None."""
    found = REQUEST_ID.match(event_id)
    return found[0] if found else None


class _Choice:
    """One choice of an answer.

    `made` counts the events made here, `shown` those that the client has. `tokens` is the checksum
    of all tokens so far, `mark` that of the tokens of the events that the client has.
    """

    __slots__ = ("made", "mark", "shown", "tokens", "weight")

    def __init__(self, number: int, had: int) -> None:
        self.weight = 2 * number + 1  # so that equal changes of two choices do not cancel out
        self.tokens = 0
        self.made = 0
        self.shown = had
        self.mark = 0


class ResumableEvents:
    """Makes a stream's events with their ids, and returns those that the client does not have.

    `numbered`: events after the end of the last choice are counted as events of that choice.
    `named`: as for `event`.
    """

    def __init__(
        self,
        request_id: str,
        choices: int,
        had: Position = START,
        *,
        named: bool = False,
        numbered: bool = False,
    ) -> None:
        check_position(had, choices)
        rows = choices if numbered else choices + 1
        counts = (had.events + (0,) * rows)[:rows]
        self._named = named
        self._own_row = not numbered
        self._prefix = f"{request_id}:"
        self._choices = [_Choice(number, count) for number, count in enumerate(counts)]
        self._expected = had.checksum
        self._checksum = 0  # over the choices' marks
        self._missing = sum(1 for count in counts if count)
        self._waiting: list[tuple[_Choice, int, Chunk]] = []

    @property
    def caught_up(self) -> bool:
        """Whether every event that the client has was made again."""
        return self._missing == 0

    def piece(self, piece: Piece, chunks: Iterable[Chunk]) -> bytes:
        """Returns those events of a piece that the client does not have. Raises ApiError
        (stream_reset)."""
        choice = self._choices[piece.choice]
        if piece.token_ids:
            choice.tokens = zlib.crc32(pack_tokens(piece.token_ids), choice.tokens)
        return b"".join([self._event(choice, chunk) for chunk in chunks])

    def closing(self, chunk: Chunk) -> bytes:
        """Returns an event that comes after all choices, or nothing if the client has it."""
        return self._event(self._choices[-1], chunk)

    def end(self) -> None:
        """Call it at the end. Raises ApiError if the client has more events than there are."""
        if self.caught_up:
            return
        raise stream_reset() if self._expected is not None else _beyond_the_end()

    def _event(self, choice: _Choice, chunk: Chunk) -> bytes:
        choice.made += 1
        if choice.made > choice.shown:
            if self.caught_up:
                return self._sent(choice, choice.tokens, chunk)
            self._waiting.append((choice, choice.tokens, chunk))
        elif choice.made == choice.shown:
            self._mark(choice, choice.tokens)
            self._missing -= 1
            if self.caught_up:
                return self._catch_up()
        return b""

    def _catch_up(self) -> bytes:
        if self._expected not in (None, self._checksum):
            raise stream_reset()
        waiting, self._waiting = self._waiting, []
        return b"".join([self._sent(*each) for each in waiting])

    def _sent(self, choice: _Choice, checksum: int, chunk: Chunk) -> bytes:
        choice.shown += 1
        self._mark(choice, checksum)
        return event(chunk, self._event_id(), named=self._named)

    def _mark(self, choice: _Choice, checksum: int) -> None:
        self._checksum = (self._checksum + choice.weight * (checksum - choice.mark)) % 2**32
        choice.mark = checksum

    def _event_id(self) -> str:
        counts = [choice.shown for choice in self._choices]
        if self._own_row and not counts[-1]:
            counts.pop()
        return f"{self._prefix}{'.'.join(map(str, counts))}-{self._checksum:08x}"


def _beyond_the_end() -> ApiError:
    return invalid(
        "starting_after: the stream has ended with fewer events; read it from its "
        "beginning without starting_after.",
        param="starting_after",
    )


def stream_reset() -> ApiError:
    """Returns the error for a stored answer that does not begin with what the client has."""
    return ApiError(
        409,
        "The stream cannot be resumed after Last-Event-ID: the stored answer is another one now. "
        "Read it from its beginning without Last-Event-ID.",
        code="stream_reset",
        headers=NO_RETRY,
    )
