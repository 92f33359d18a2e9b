"""Changes of a followed file are read, and a failing watch is reported."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from headrace_common.followed_file import FollowedFile
from headrace_testing.waiting import eventually


class Words(FollowedFile[list[str]]):
    name = "words"
    setting = "words_file"
    remedy = "an editor"
    max_bytes = 100

    def _parse(self, data: bytes) -> list[str]:
        return data.decode().split()

    def _use(self, content: list[str]) -> Mapping[str, object]:
        self.words = content
        return {}


async def at_once(_: float) -> None:
    await asyncio.sleep(0)


async def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "words"
    path.write_text("one two")
    words = Words(path, at_once)

    async def read() -> bool:
        return words.words == ["three"]

    words.start()
    path.write_text("three")
    await eventually(read)
    assert words.failed is None
    await words.close()

    assert words.failed is None


async def test_a_watch_that_has_failed_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "words"
    path.write_text("one two")
    words = Words(path, at_once)

    async def ended() -> bool:
        return words.failed is not None

    words.start()
    path.write_bytes(b"\xff")  # not UTF-8, which `_parse` fails to refuse
    await eventually(ended)

    assert words.failed == "the watch of the words has failed; the process must be restarted"
    assert words.words == ["one", "two"]
    await words.close()
