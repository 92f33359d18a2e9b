"""Rebuilds a request's output when its gateway is gone: the journal, then the frames behind it.

Only what one engine said in one attempt belongs together: tokens of different attempts are of
different histories, and so are those before and after the engine asked anew (Takeover).
"""

from collections.abc import Iterable, Mapping, Sequence

from ..errors import MessageError
from ..frames import decode_ending
from ..messages import ChoiceState, Frame, Sync, Takeover, Tokens, unpack_tokens

EntryId = tuple[int, int]


class _Choice:
    def __init__(self, token_ids: list[int], reason: str | None, stop: int | None) -> None:
        self.token_ids = token_ids
        self.reason = reason
        self.stop = stop

    def extend(self, index: int, token_ids: tuple[int, ...]) -> bool:
        """Adds what is new of tokens from `index`; False where some before them are missing."""
        known = len(self.token_ids)
        if index > known:
            return False
        self.token_ids += token_ids[known - index :]
        return True

    def end(self, reason: str | None, stop: int | None) -> None:
        if reason is not None:
            self.reason, self.stop = reason, stop

    def state(self) -> ChoiceState:
        return ChoiceState(
            token_ids=tuple(self.token_ids), finish_reason=self.reason, stop_token=self.stop
        )


def rebuild(
    request_id: str,
    writer: str,
    choices: int,
    journal: Mapping[bytes, bytes],
    frames: Iterable[tuple[EntryId, Frame]],
) -> tuple[ChoiceState, ...]:
    """The output that `writer` ("engine/attempt") is known to have made.

    `frames` are of all gateways that the request had, with their ids. Raises MessageError.
    """
    known = [_from_journal(journal, number).state() for number in range(choices)]
    return rebuild_from(request_id, writer, known, frames)


def rebuild_from(
    request_id: str,
    writer: str,
    journal: Sequence[ChoiceState],
    frames: Iterable[tuple[EntryId, Frame]],
) -> tuple[ChoiceState, ...]:
    """As rebuild, from a journal that is read already."""
    known = [_Choice(list(c.token_ids), c.finish_reason, c.stop_token) for c in journal]
    said = sorted(_said(request_id, writer, frames), key=lambda item: item[0])
    takeovers = [at for at, reply in said if isinstance(reply, Takeover)]
    since = max(takeovers, default=(0, 0))
    for at, reply in said:
        if at > since:
            _apply(known, reply)
    return tuple(choice.state() for choice in known)


def _said(
    request_id: str, writer: str, frames: Iterable[tuple[EntryId, Frame]]
) -> Iterable[tuple[EntryId, Tokens | Sync | Takeover]]:
    for at, frame in frames:
        for reply in frame.replies:
            if (
                isinstance(reply, Tokens | Sync | Takeover)
                and reply.request_id == request_id
                and f"{frame.engine_id}/{reply.attempt}" == writer
            ):
                yield at, reply


def _apply(known: list[_Choice], reply: Tokens | Sync | Takeover) -> None:
    if isinstance(reply, Tokens) and reply.choice < len(known):
        choice = known[reply.choice]
        if choice.extend(reply.index, reply.token_ids):
            choice.end(reply.finish_reason, reply.stop_token)
    elif isinstance(reply, Sync):
        for choice, state in zip(known, reply.choices, strict=False):
            choice.extend(0, state.token_ids)
            choice.end(state.finish_reason, state.stop_token)


def _from_journal(journal: Mapping[bytes, bytes], number: int) -> _Choice:
    length = int(journal.get(b"%d" % number, 0))
    prefix = b"%d:" % number
    chunks = {
        int(name[len(prefix) :]): unpack_tokens(data)
        for name, data in journal.items()
        if name.startswith(prefix)
    }
    reason, stop = decode_ending(journal.get(b"%df" % number, b""))
    choice = _Choice([], reason, stop)
    for index in sorted(chunks):
        if not choice.extend(index, chunks[index]):
            raise MessageError(f"journal: tokens before {index} of choice {number} are missing")
    if len(choice.token_ids) != length:
        raise MessageError(f"journal: {len(choice.token_ids)} tokens of choice {number}: {length}")
    return choice
