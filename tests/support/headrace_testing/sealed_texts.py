"""Reads the texts of clients and models, with the keys, from the append-only file of a sealed
Redis.

The file contains every value that was ever written, so it can be searched for plain prompts and
answers.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from headrace_common.errors import MessageError
from headrace_common.protocol.batches import BatchRequest, decode_record
from headrace_common.protocol.frames import decode_control, decode_frame, decode_outcome
from headrace_common.protocol.redis.journal import journal_piece
from headrace_common.protocol.store import decode_stored
from headrace_common.sealing.aes import AesSealer
from headrace_common.sealing.keyring import Keyring
from headrace_common.sealing.sealer import MAGIC, Binding, PayloadKind, SealingError
from headrace_common.wire.messages import (
    Drain,
    Recall,
    Sync,
    Tokens,
    UnknownVersion,
    decode_request,
)

from .redis_dump import forms

ROW = 8  # in tokens: fewer could occur by chance
DISTINCT = 4
TEXT = 24  # characters
HEAD = 8  # bytes
LOWEST = np.uint64(2**20 - 1)

Output = dict[int, int]  # tokens by position
Piece = tuple[
    tuple[PayloadKind, Binding], str, bytes
]  # of a journal: its kind and binding, its model, its value


def commands(data: bytes) -> Iterator[tuple[list[bytes], int]]:
    """The commands of a file, and the end of each; an incomplete one is left out."""
    at = 0
    while (line := data.find(b"\r\n", at)) >= 0:
        if data[at : at + 1] != b"*":  # an annotation, or a snapshot
            at = line + 2
            continue
        words, end = _words(data, int(data[at + 1 : line]), line + 2)
        if end < 0:
            return
        yield words, end
        at = end


def _words(data: bytes, count: int, at: int) -> tuple[list[bytes], int]:
    words = []
    for _ in range(count):
        line = data.find(b"\r\n", at)
        if line < 0 or data[at : at + 1] != b"$":
            return [], -1
        size = int(data[at + 1 : line])
        word = data[line + 2 : line + 2 + size]
        at = line + 2 + size + 2
        if len(word) < size:
            return [], -1
        words.append(word)
    return words, at


def append_only_files(folder: Path) -> list[Path]:
    """The append-only files of every server below a folder."""
    return sorted(path for path in folder.rglob("appendonlydir/*.aof") if path.stat().st_size)


class SealedTexts:
    """Opens the sealed values that commands wrote, and keeps the texts in them.

    `opened` counts values by kind; `plain` names the keys of values that should have been sealed.
    """

    def __init__(self, ring: Keyring) -> None:
        self._sealer = AesSealer(ring)
        self._writers: dict[str, str] = {}
        self._pieces: defaultdict[str, list[Piece]] = defaultdict(list)
        self._tenants: dict[str, str] = {}
        self._outputs: defaultdict[tuple[str, int, int], Output] = defaultdict(dict)
        self._rows: dict[tuple[int, ...], str] = {}
        self._texts: dict[str, str] = {}
        self.opened: defaultdict[PayloadKind, int] = defaultdict(int)
        self.plain: set[str] = set()

    def read(self, data: bytes) -> int:
        """Reads new bytes of a file; returns how many of them were complete commands.

        Raises MessageError.
        """
        end = 0
        for words, whole in commands(data):
            self._command(words)
            end = whole
        return end

    def _command(self, words: list[bytes]) -> None:
        name = words[0].upper()
        if name == b"SET":
            self._value(words[1].decode(errors="replace"), b"", words[2])
        elif name in (b"HSET", b"HSETNX", b"HMSET"):
            for field, value in zip(words[2::2], words[3::2], strict=False):
                self._value(words[1].decode(errors="replace"), field, value)
        elif name == b"XADD" and words[-2] in (b"f", b"c"):
            self._value(words[1].decode(errors="replace"), words[-2], words[-1])

    def needles(self) -> dict[bytes, str]:
        """Data that must not be found, with its description: rows of tokens in each encoding, and
        texts."""
        rows = dict(self._rows)
        for (rid, attempt, choice), output in self._outputs.items():
            what = f"tokens of {rid}, attempt {attempt}, choice {choice}"
            rows |= dict.fromkeys(_stretches(output), what)
        pieces = {piece: what for row, what in rows.items() for piece in _pieces(row)}
        found = {form: what for row, what in pieces.items() for form in forms(row, len(row))}
        return found | {text.encode(): what for text, what in self._texts.items()}

    def _value(self, key: str, field: bytes, value: bytes) -> None:
        kind, _, rest = key.partition(":")
        tag, _, name = rest.removeprefix("{").partition("}")
        read: Callable[[str, str, bytes, bytes], None] | None = {
            "p": self._payload,
            "r": self._record,
            "j": self._journal,
            "o": self._frame,
            "c": self._control,
            "rq": self._stored,
            "fi": self._file,
            "ba": self._batch,
            "br": self._result,
            "mf": self._model,
        }.get(kind)
        if read is not None:
            read(tag, name.removeprefix(":"), field, value)

    def _open(self, kind: PayloadKind, binding: Binding, value: bytes) -> bytes | None:
        if not value.startswith(MAGIC):
            if _says_something(kind, value):
                self.plain.add(f"{kind} {binding}")
            return None
        opened = self._sealer.open(kind, binding, value)
        self.opened[kind] += 1
        return opened

    def _payload(self, tag: str, rid: str, _field: bytes, value: bytes) -> None:
        if opened := self._open(PayloadKind.PAYLOAD, (_model(tag), rid), value):
            with suppress(UnknownVersion):  # written by tests of updates
                self._rows[decode_request(opened).prompt_token_ids] = f"prompt of {rid}"

    def _record(self, tag: str, rid: str, field: bytes, value: bytes) -> None:
        if field == b"je":
            self._writers[rid] = value.decode()
            self._open_pieces(rid)
        elif field == b"out" and value:
            if opened := self._open(PayloadKind.OUTCOME, (_model(tag), rid), value):
                self._say(
                    f"outcome of {rid}", (one.token_ids for one in decode_outcome(opened).choices)
                )

    def _journal(self, tag: str, rid: str, field: bytes, value: bytes) -> None:
        piece = journal_piece(field)
        if piece is None:
            return
        self._pieces[rid].append((piece, _model(tag), value))
        if rid in self._writers:
            self._open_pieces(rid)

    def _open_pieces(self, rid: str) -> None:
        """Opens the pieces of known writers: RESUME writes the journal before the name of its
        writer. Frames have the same content, so pieces are not stored."""
        left = []
        for piece in self._pieces.pop(rid, ()):
            (kind, where), model, value = piece
            try:
                self._open(kind, (model, rid, self._writers[rid], *where), value)
            except SealingError:
                left.append(piece)
        if left:
            self._pieces[rid] = left

    def _frame(self, tag: str, _name: str, _field: bytes, value: bytes) -> None:
        opened = self._open(PayloadKind.FRAME, (unquote(tag.partition(".")[2]),), value)
        for reply in decode_frame(opened).replies if opened else ():
            if isinstance(reply, Tokens):
                output = self._outputs[reply.request_id, reply.attempt, reply.choice]
                output |= dict(enumerate(reply.token_ids, reply.index))
            elif isinstance(reply, Sync):
                self._say(f"sync of {reply.request_id}", (one.token_ids for one in reply.choices))

    def _control(self, tag: str, _name: str, _field: bytes, value: bytes) -> None:
        self._open(PayloadKind.CONTROL, (unquote(tag.partition(".")[2]),), value)

    def _stored(self, tag: str, _name: str, field: bytes, value: bytes) -> None:
        if field == b"b" and (
            opened := self._open(PayloadKind.STORED_REQUEST, (unquote(tag),), value)
        ):
            stored = decode_stored(opened)
            what = f"stored request {unquote(tag)}"
            self._say(what, (request.prompt_token_ids for request in stored.requests))
            self._texts |= dict.fromkeys((text for text in stored.stop if len(text) >= TEXT), what)

    def _file(self, tag: str, _name: str, field: bytes, value: bytes) -> None:
        # its pieces belong to the tenant that this names, and were written before
        if field == b"m":
            self._open(PayloadKind.FILE, (unquote(tag.partition(".")[2]),), value)
        elif not value.startswith(MAGIC):
            self.plain.add(f"file piece {tag}")

    def _batch(self, tag: str, _name: str, field: bytes, value: bytes) -> None:
        batch = unquote(tag.partition(".")[2])
        if field == b"m" and (opened := self._open(PayloadKind.BATCH, (batch,), value)):
            self._tenants[batch] = decode_record(BatchRequest, opened).tenant
        elif field == b"p":
            self._open(PayloadKind.BATCH_PROGRESS, (batch,), value)

    def _result(self, tag: str, _name: str, field: bytes, value: bytes) -> None:
        batch = unquote(tag.partition(".")[2])
        binding = (batch, self._tenants.get(batch, ""), int(field))
        if opened := self._open(PayloadKind.BATCH_RESULT, binding, value):
            self._texts[opened[:TEXT].decode(errors="replace")] = f"result of {batch}"

    def _say(self, what: str, rows: Iterable[tuple[int, ...]]) -> None:
        self._rows |= dict.fromkeys(rows, what)

    def _model(self, _tag: str, name: str, _field: bytes, value: bytes) -> None:
        self._open(PayloadKind.MODEL_FILES, (name,), value)


def _says_something(kind: PayloadKind, value: bytes) -> bool:
    """Whether an unsealed value could contain text: not values that tests write to be refused, nor
    Drain or Recall, whose sender has no keys."""
    try:
        return kind not in _READ or _READ[kind](value) not in (Drain(), Recall())
    except MessageError:
        return False


_READ: Mapping[PayloadKind, Callable[[bytes], object]] = {
    PayloadKind.PAYLOAD: decode_request,
    PayloadKind.OUTCOME: decode_outcome,
    PayloadKind.FRAME: decode_frame,
    PayloadKind.CONTROL: decode_control,
}


def _model(tag: str) -> str:
    return unquote(tag.partition(":")[0].rpartition(".")[0])


def _stretches(output: Output) -> Iterable[tuple[int, ...]]:
    """Runs of tokens without gaps."""
    positions, row = sorted(output), list[int]()
    for here, following in pairwise([*positions, -1]):
        row.append(output[here])
        if following != here + 1:
            yield tuple(row)
            row = []


def _pieces(row: Sequence[int]) -> Iterable[tuple[int, ...]]:
    """The beginning and the middle of a row, if they are long and varied enough not to occur by
    chance."""
    for at in (0, len(row) // 2):
        piece = tuple(row[at : at + ROW])
        steps = {following - here for here, following in pairwise(piece)}
        if len(piece) == ROW and len(set(piece)) >= DISTINCT and len(steps) > 1:
            yield piece


def found_in(haystack: bytes, needles: Iterable[bytes]) -> list[bytes]:
    """The needles that occur in the haystack. Thousands of needles cost little more than one,
    because a table over the lowest bits of their first bytes excludes most positions."""
    by_head: defaultdict[int, list[bytes]] = defaultdict(list)
    found = set()
    for needle in needles:
        if len(needle) >= HEAD:
            by_head[int.from_bytes(needle[:HEAD], "little")].append(needle)
        elif needle in haystack:
            found.add(needle)
    heads = np.array(sorted(by_head), dtype=np.uint64)
    known = np.zeros(int(LOWEST) + 1, dtype=bool)
    known[heads & LOWEST] = True
    for offset in range(min(HEAD, len(haystack))):
        words = np.frombuffer(haystack, "<u8", (len(haystack) - offset) // HEAD, offset)
        likely = np.flatnonzero(known[words & LOWEST])
        for at in likely[np.isin(words[likely], heads)].tolist():
            start = offset + HEAD * at
            found |= {n for n in by_head[int(words[at])] if haystack.startswith(n, start)}
    return sorted(found)
