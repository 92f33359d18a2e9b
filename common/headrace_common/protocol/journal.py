"""Rebuilds a request's output when its gateway is gone, from the journal and later frames.

Only tokens of one engine in one attempt belong together. A Takeover begins anew: what was sent
before it is ignored.
"""

from collections.abc import Iterable, Mapping, Sequence

from ..errors import MessageError
from ..wire.messages import ChoiceState, Frame, Logprobs, Sync, Takeover, Tokens, unpack_tokens
from .frames import decode_ending, decode_logprobs

EntryId = tuple[int, int]


class _Choice:
    def __init__(self, state: ChoiceState) -> None:
        self.token_ids = list(state.token_ids)
        self.logprobs = list(state.logprobs or ())
        self.reason = state.finish_reason
        self.stop = state.stop_token
        self.embedding = state.embedding

    def extend(
        self, index: int, token_ids: tuple[int, ...], logprobs: tuple[Logprobs, ...] | None
    ) -> bool:
        """Adds those of the tokens that are new; False if tokens before `index` are missing."""
        known = len(self.token_ids)
        if index > known:
            return False
        if logprobs is not None and len(self.logprobs) == known:
            self.logprobs += logprobs[known - index :]
        self.token_ids += token_ids[known - index :]
        return True

    def end(self, reply: Tokens | ChoiceState) -> None:
        if reply.finish_reason is not None:
            self.reason, self.stop = reply.finish_reason, reply.stop_token
            self.embedding = reply.embedding

    def state(self) -> ChoiceState:
        known = self.logprobs and len(self.logprobs) == len(self.token_ids)
        return ChoiceState(
            token_ids=tuple(self.token_ids),
            finish_reason=self.reason,
            stop_token=self.stop,
            logprobs=tuple(self.logprobs) if known else None,
            embedding=self.embedding,
        )


def rebuild(
    request_id: str,
    writer: str,
    choices: int,
    journal: Mapping[bytes, bytes],
    frames: Iterable[tuple[EntryId, Frame]],
) -> tuple[ChoiceState, ...]:
    """The known output of `writer` ("engine/attempt").

    `frames` are those of all gateways that the request had, with their ids. Raises MessageError.
    """
    known = [_from_journal(journal, number).state() for number in range(choices)]
    return rebuild_from(request_id, writer, known, frames)


def rebuild_from(
    request_id: str,
    writer: str,
    journal: Sequence[ChoiceState],
    frames: Iterable[tuple[EntryId, Frame]],
) -> tuple[ChoiceState, ...]:
    """Like `rebuild`, from a journal that has been read."""
    known = [_Choice(state) for state in journal]
    replies = sorted(_replies_of(request_id, writer, frames), key=lambda item: item[0])
    takeovers = [at for at, reply in replies if isinstance(reply, Takeover)]
    since = max(takeovers, default=(0, 0))
    for at, reply in replies:
        if at > since:
            _apply(known, reply)
    return tuple(choice.state() for choice in known)


def _replies_of(
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
        if choice.extend(reply.index, reply.token_ids, reply.logprobs):
            choice.end(reply)
    elif isinstance(reply, Sync):
        for choice, state in zip(known, reply.choices, strict=False):
            choice.extend(0, state.token_ids, state.logprobs)
            choice.end(state)


def _from_journal(journal: Mapping[bytes, bytes], number: int) -> _Choice:
    length = int(journal.get(b"%d" % number, 0))
    reason, stop = decode_ending(journal.get(b"%df" % number, b""))
    choice = _Choice(ChoiceState(finish_reason=reason, stop_token=stop))
    chunks = _by_index(journal, b"%d:" % number)
    logprobs = _by_index(journal, b"%dl:" % number)
    for index in sorted(chunks):
        tokens = unpack_tokens(chunks[index])
        if not choice.extend(index, tokens, _positions(logprobs.get(index, b""), len(tokens))):
            raise MessageError(f"journal: tokens before {index} of choice {number} are missing")
    if len(choice.token_ids) != length:
        raise MessageError(
            f"journal: choice {number} has {len(choice.token_ids)} tokens, not {length}"
        )
    return choice


def _positions(data: bytes, tokens: int) -> tuple[Logprobs, ...] | None:
    """The log probabilities; None if they were written for other tokens, before these."""
    try:
        return decode_logprobs(data, tokens) if data else None
    except MessageError:
        return None


def _by_index(journal: Mapping[bytes, bytes], prefix: bytes) -> dict[int, bytes]:
    return {
        int(name[len(prefix) :]): data for name, data in journal.items() if name.startswith(prefix)
    }
