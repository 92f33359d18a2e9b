"""Sealing: which keys open which values, what is refused, and how keys change."""

import asyncio
import os
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import pytest

from headrace_common.errors import SettingsError
from headrace_common.sealing.aes import OVERHEAD_BYTES, AesSealer
from headrace_common.sealing.keyring import Keyring, KeyringError, SealingKey, new_key, read_keyring
from headrace_common.sealing.keyring_file import KeyringFile
from headrace_common.sealing.sealer import (
    LARGE_BYTES,
    NULL_SEALER,
    Binding,
    PayloadKind,
    SealingError,
    opened,
    sealed,
)
from headrace_common.sealing.settings import SealingMode
from headrace_testing.sealed_texts import found_in

TEXT = b"what a client said"
HERE: Binding = ("model", "0.abc")


@pytest.fixture
def ring() -> Keyring:
    return Keyring([new_key()])


@dataclass
class Settings:
    sealing_keys_file: Path | None
    sealing_mode: SealingMode = "require"


def write(path: Path, *keys: SealingKey) -> None:
    path.write_text("".join(f"{key.line}\n" for key in keys))


def test_another_process_with_the_keys_opens_sealed_data(ring: Keyring) -> None:
    record = AesSealer(ring).seal(PayloadKind.PAYLOAD, HERE, TEXT)

    assert AesSealer(ring).open(PayloadKind.PAYLOAD, HERE, record) == TEXT
    assert TEXT not in record and len(record) == len(TEXT) + OVERHEAD_BYTES


def test_two_records_of_the_same_text_share_no_bytes(ring: Keyring) -> None:
    sealer = AesSealer(ring)
    records = [sealer.seal(PayloadKind.PAYLOAD, HERE, TEXT) for _ in range(1000)]
    records += [AesSealer(ring).seal(PayloadKind.PAYLOAD, HERE, TEXT) for _ in range(1000)]

    assert len({record[-len(TEXT) - 16 :] for record in records}) == 2000


@pytest.mark.parametrize(
    ("kind", "binding"),
    [
        (PayloadKind.OUTCOME, HERE),
        (PayloadKind.PAYLOAD, ("model", "0.abd")),
        (PayloadKind.PAYLOAD, ("other", "0.abc")),
        (PayloadKind.PAYLOAD, ("model", "0.abc", 0)),
        (PayloadKind.PAYLOAD, ("model0", ".abc")),
        (PayloadKind.PAYLOAD, ("model",)),
    ],
)
def test_a_record_opens_only_in_its_own_place(
    ring: Keyring, kind: PayloadKind, binding: Binding
) -> None:
    sealer = AesSealer(ring)
    record = sealer.seal(PayloadKind.PAYLOAD, HERE, TEXT)

    with pytest.raises(SealingError, match="changed, or belongs to another place"):
        sealer.open(kind, binding, record)


def test_pieces_cannot_change_places(ring: Keyring) -> None:
    """Each request, attempt, choice and position has its own binding."""
    sealer = AesSealer(ring)
    bindings: list[Binding] = [
        ("model", request, writer, choice, index)
        for request in ("0.a", "0.b")
        for writer in ("e/1", "e/2")
        for choice in (0, 1)
        for index in (0, 4)
    ]
    for one, other in permutations(bindings, 2):
        with pytest.raises(SealingError):
            sealer.open(PayloadKind.JOURNAL, other, sealer.seal(PayloadKind.JOURNAL, one, TEXT))


def test_every_changed_byte_is_detected(ring: Keyring) -> None:
    sealer = AesSealer(ring)
    record = sealer.seal(PayloadKind.PAYLOAD, HERE, TEXT)

    for at in range(len(record)):
        changed = bytearray(record)
        changed[at] ^= 1
        with pytest.raises(SealingError):
            sealer.open(PayloadKind.PAYLOAD, HERE, bytes(changed))
    for length in range(3, len(record)):
        with pytest.raises(SealingError):
            sealer.open(PayloadKind.PAYLOAD, HERE, record[:length])


def test_a_forked_child_does_not_reuse_the_counters_of_its_parent(ring: Keyring) -> None:
    sealer = AesSealer(ring)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, sealer.seal(PayloadKind.PAYLOAD, HERE, TEXT))
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(reading, 4096)
    ours = sealer.seal(PayloadKind.PAYLOAD, HERE, TEXT)

    assert theirs[: -len(TEXT)] != ours[: -len(TEXT)]
    assert sealer.open(PayloadKind.PAYLOAD, HERE, theirs) == TEXT


def test_keys_change_while_records_of_both_exist() -> None:
    old, new = new_key(), new_key()
    sealer = AesSealer(Keyring([old]))
    before = sealer.seal(PayloadKind.PAYLOAD, HERE, TEXT)
    sealer.replace(Keyring([new, old]))
    after = sealer.seal(PayloadKind.PAYLOAD, HERE, TEXT)

    assert sealer.open(PayloadKind.PAYLOAD, HERE, before) == sealer.open(
        PayloadKind.PAYLOAD, HERE, after
    )
    sealer.replace(Keyring([new]))
    assert sealer.open(PayloadKind.PAYLOAD, HERE, after) == TEXT
    with pytest.raises(SealingError, match=f"with the key {old.name}, which is not in"):
        sealer.open(PayloadKind.PAYLOAD, HERE, before)


def test_unsealed_data_is_refused_unless_the_mode_accepts_it(ring: Keyring) -> None:
    with pytest.raises(SealingError, match="not sealed; .* set sealing_mode to accept"):
        AesSealer(ring).open(PayloadKind.PAYLOAD, HERE, TEXT)
    assert AesSealer(ring, "accept").open(PayloadKind.PAYLOAD, HERE, TEXT) == TEXT
    assert AesSealer(ring, "open").open(PayloadKind.PAYLOAD, HERE, TEXT) == TEXT


def test_in_mode_open_nothing_is_sealed_and_sealed_values_are_opened(ring: Keyring) -> None:
    record = AesSealer(ring).seal(PayloadKind.PAYLOAD, HERE, TEXT)

    assert AesSealer(ring, "open").seal(PayloadKind.PAYLOAD, HERE, TEXT) == TEXT
    assert AesSealer(ring, "open").open(PayloadKind.PAYLOAD, HERE, record) == TEXT


def test_without_keys_sealed_data_is_refused_and_plain_data_is_read(ring: Keyring) -> None:
    record = AesSealer(ring).seal(PayloadKind.PAYLOAD, HERE, TEXT)

    assert (
        NULL_SEALER.open(
            PayloadKind.PAYLOAD, HERE, NULL_SEALER.seal(PayloadKind.PAYLOAD, HERE, TEXT)
        )
        == TEXT
    )
    with pytest.raises(SealingError, match="has no keys: set sealing_keys_file"):
        NULL_SEALER.open(PayloadKind.PAYLOAD, HERE, record)


async def test_large_records_are_sealed_and_opened_in_threads(ring: Keyring) -> None:
    large, sealer = os.urandom(LARGE_BYTES), AesSealer(ring)
    records = await asyncio.gather(
        *(sealed(sealer, PayloadKind.FILE_PIECE, (number,), large) for number in range(8))
    )

    for number, record in enumerate(records):
        assert await opened(sealer, PayloadKind.FILE_PIECE, (number,), record) == large


def test_digests_depend_on_the_secret_that_processes_share(ring: Keyring) -> None:
    digest = os.urandom(16)
    one, same, other = AesSealer(ring), AesSealer(ring, "accept"), AesSealer(ring, "open")
    for sealer in (one, same, other):
        sealer.share(b"s" * 32)

    (own,) = one.digests(digest)
    assert own != digest and len(own) == len(digest)
    assert same.digests(digest) == (own, digest)
    assert other.digests(digest) == (digest, own)
    assert NULL_SEALER.digests(digest) == (digest,)


# The search used by tests of sealed suites


def test_a_search_finds_a_text_at_any_offset() -> None:
    needles = [bytes([number, *range(12)]) for number in range(50)]
    there, short = needles[7], b"abc"
    for before in range(20):
        haystack = os.urandom(before) + there + b"-abc-"
        assert found_in(haystack, [*needles, short]) == sorted([there, short])
    assert found_in(there[:-1] + b"x", needles) == found_in(b"", needles) == []


# Files


def test_a_file_has_one_key_for_each_line_and_comments() -> None:
    first, second = new_key(), new_key()
    ring = read_keyring(f"# of spring\n{first.line} # seals\n\n{second.line}\n".encode())

    assert ring.names == [first.name, second.name] and ring.first == first
    assert first.line not in repr(ring.first)


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        (b"", "0 keys"),
        (b"# nothing\n", "0 keys"),
        (b"\n???\n", "line 2 is not base64"),
        (b"c2hvcnQ=\n", "line 1: a key has 32 bytes, not 5"),
        (b"x" * 70_000, "more than 65536 bytes"),
    ],
)
def test_the_error_of_a_wrong_file_names_the_line_and_not_its_content(
    data: bytes, wrong: str
) -> None:
    with pytest.raises(KeyringError, match=wrong) as caught:
        read_keyring(data)
    assert "c2hvcnQ" not in str(caught.value)


def test_the_same_key_twice_is_refused() -> None:
    line = new_key().line
    with pytest.raises(KeyringError, match="same key twice"):
        read_keyring(f"{line}\n{line}\n".encode())


def test_a_missing_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"sealing_keys_file: .*: No such file"):
        KeyringFile(Settings(tmp_path / "none"))


async def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, old, new = tmp_path / "keyring", new_key(), new_key()
    write(path, old)
    file = KeyringFile(Settings(path))
    record = file.sealer.seal(PayloadKind.PAYLOAD, HERE, TEXT)
    path.write_text("half a ke")
    await file.refresh()
    await file.refresh()
    assert file.sealer.key_id == old.id
    assert caplog.text.count("sealing keys cannot be read, the known ones stay") == 1

    write(path, new, old)
    await file.refresh()
    assert file.sealer.key_id == new.id
    assert file.sealer.open(PayloadKind.PAYLOAD, HERE, record) == TEXT


def test_without_a_file_nothing_is_sealed() -> None:
    assert KeyringFile(Settings(None)).sealer is NULL_SEALER
