"""The files of the shared tier: whole, checked, bounded, and shared by engines."""

import os
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import pytest

from headrace_engine.kv_cache.block_folder import ABANDONED, KEPT, BlockFolder

MODEL, OTHER = b"model", b"other"
SIZE = 2**20
BLOCK = 3000


def name_of(number: int) -> bytes:
    return sha256(number.to_bytes(4, "big")).digest()


def content(number: int) -> list[bytearray]:
    """The content of a block in three buffers."""
    return [bytearray([number % 251 + part]) * (BLOCK // 3) for part in range(3)]


def views(buffers: Sequence[bytearray]) -> list[memoryview]:
    return [memoryview(buffer) for buffer in buffers]


def write(folder: BlockFolder, number: int) -> None:
    folder.write(name_of(number), views(content(number)))


def read(folder: BlockFolder, number: int) -> list[bytearray] | None:
    buffers = [bytearray(BLOCK // 3) for _ in range(3)]
    return buffers if folder.read(name_of(number), views(buffers)) else None


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_block_comes_back_as_it_was_also_to_another_engine(tmp_path: Path) -> None:
    write(BlockFolder(tmp_path, MODEL, SIZE), 1)
    again = BlockFolder(tmp_path, MODEL, SIZE)
    assert again.has(name_of(1)) and not again.has(name_of(2))
    assert read(again, 1) == content(1)
    assert read(again, 2) is None


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    write(BlockFolder(tmp_path, MODEL, SIZE), 1)
    other = BlockFolder(tmp_path, OTHER, SIZE)
    assert not other.has(name_of(1)) and read(other, 1) is None


def test_only_the_owner_reads_the_files(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path / "kv", MODEL, SIZE)
    write(folder, 1)
    assert folder.path(name_of(1)).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "kv" / MODEL.hex()).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("at", [0, 8, 20, 60, 3000])
def test_a_changed_byte_is_a_miss(tmp_path: Path, at: int) -> None:
    folder = BlockFolder(tmp_path, MODEL, SIZE)
    write(folder, 1)
    path = folder.path(name_of(1))
    stored = bytearray(path.read_bytes())
    stored[at] ^= 1
    path.write_bytes(stored)
    assert read(folder, 1) is None
    assert not folder.has(name_of(1)), "it is written again later"


@pytest.mark.parametrize("length", [0, 10, 48, 1000, BLOCK + 47, BLOCK + 49])
def test_a_torn_file_is_a_miss(tmp_path: Path, length: int) -> None:
    folder = BlockFolder(tmp_path, MODEL, SIZE)
    write(folder, 1)
    path = folder.path(name_of(1))
    path.write_bytes((path.read_bytes() + b"\0" * 10)[:length])
    assert read(folder, 1) is None


@pytest.mark.parametrize("foreign", ["another block", "another model"])
def test_the_file_of_something_else_is_a_miss(tmp_path: Path, foreign: str) -> None:
    folder = BlockFolder(tmp_path, MODEL, SIZE)
    other = folder if foreign == "another block" else BlockFolder(tmp_path, OTHER, SIZE)
    number = 2 if foreign == "another block" else 1
    write(other, number)
    path = folder.path(name_of(1))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(other.path(name_of(number)).read_bytes())
    assert read(folder, 1) is None


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path, MODEL, SIZE)
    write(folder, 1)
    path = folder.path(name_of(1))
    moved = path.rename(tmp_path / "elsewhere")
    path.symlink_to(moved)
    with pytest.raises(OSError):
        read(folder, 1)


def test_a_full_volume_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = BlockFolder(tmp_path, MODEL, SIZE)
    monkeypatch.setattr(os, "writev", lambda file, parts: 10)
    with pytest.raises(OSError, match="no room"):
        write(folder, 1)
    assert not files(tmp_path) and not folder.has(name_of(1))


def test_many_buffers_are_one_block(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path, MODEL, SIZE)
    buffers = [bytearray([part % 256]) * 3 for part in range(1500)]
    folder.write(name_of(1), views(buffers))
    found = [bytearray(3) for _ in range(1500)]
    assert folder.read(name_of(1), views(found)) and found == buffers


def age(folder: BlockFolder, number: int, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(folder.path(name_of(number)), (then, then))


def test_the_files_that_were_not_used_for_longest_are_deleted(tmp_path: Path) -> None:
    size = 64 * (BLOCK + 48)
    folder = BlockFolder(tmp_path, MODEL, size)
    for number in range(60):
        write(folder, number)
        age(folder, number, 10_000 - number)
    assert read(folder, 0) == content(0), "which is a use"
    for number in range(60, 120):
        write(folder, number)
        age(folder, number, 9_000 - number)
    assert sum(path.stat().st_size for path in files(tmp_path)) <= size
    assert len(files(tmp_path)) >= 64 * KEPT - 4
    assert folder.has(name_of(0)) and folder.has(name_of(119))
    assert not folder.has(name_of(1)) and not folder.has(name_of(20))


def test_several_engines_share_one_bound(tmp_path: Path) -> None:
    size = 64 * (BLOCK + 48)
    engines = [BlockFolder(tmp_path, MODEL, size), BlockFolder(tmp_path, OTHER, size)]
    for number in range(200):
        write(engines[number % 2], number)
        assert sum(path.stat().st_size for path in files(tmp_path)) <= size


def test_files_that_a_dead_engine_left_are_deleted(tmp_path: Path) -> None:
    folder = BlockFolder(tmp_path, MODEL, SIZE)
    write(folder, 1)
    left = folder.path(name_of(1)).with_name("left.tmp")
    left.write_bytes(b"half")
    new = left.with_name("new.tmp")
    new.write_bytes(b"half")
    old = time.time() - ABANDONED - 1.0
    os.utime(left, (old, old))
    write(BlockFolder(tmp_path, OTHER, SIZE), 2)
    assert not left.exists() and new.exists()
