"""A batch's results as lines of its output and error files."""

import hashlib
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace_common.protocol.batches import Batch, BatchResult, StoredFile, TokenUsage
from headrace_common.protocol.redis.batches import RedisBatches
from headrace_common.protocol.redis.files import CHUNK_BYTES, RedisFiles

from ..limits.tenant_stores import TenantStores
from .internal import InternalAnswer
from .items import file_item
from .lines import Line

OUTPUT_PURPOSE = "batch_output"
# The maximal number of results, and of their bytes, in memory while a file is made.
PAGE_LINES = 64
PAGE_BYTES = 4 * 2**20
_USAGE = b'"usage":'
_MAX_USAGE_BYTES = 2048
_JSON = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Result:
    """One line of a file, without its end."""

    text: bytes
    answered: bool
    usage: TokenUsage = TokenUsage()


def answer_result(batch: Batch, line: Line, answer: InternalAnswer) -> Result:
    """Returns the result of an endpoint's answer, whether it succeeded or not."""
    head = {
        "status_code": answer.status,
        "request_id": answer.headers.get("x-request-id", ""),
    }
    body = answer.body if b"\n" not in answer.body else _one_line(answer.body)
    response = json.dumps(head, separators=(",", ":")).encode()[:-1] + b',"body":' + body + b"}"
    text, answered = _line(batch, line, response, b"null"), answer.status == 200
    return Result(text, answered, usage_of(answer.body) if answered else TokenUsage())


def usage_of(body: bytes) -> TokenUsage:
    """Returns the tokens that an answer reports as used; zeros if it reports none.

    Reads them from its end without the rest, which may be megabytes. Quotes within a JSON string
    are escaped, so that this can only be the field's name.
    """
    at = len(body)
    while (at := body.rfind(_USAGE, 0, at)) >= 0:
        found = _token_usage(body[at + len(_USAGE) : at + _MAX_USAGE_BYTES])
        if found is not None:
            return found
    return TokenUsage()


def _token_usage(text: bytes) -> TokenUsage | None:
    try:
        fields, _ = _JSON.raw_decode(text.decode(errors="replace").lstrip())
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    given = _tokens(fields, "prompt_tokens", "input_tokens")
    if given is None:
        return None
    return TokenUsage(
        given,
        _detail(fields, "cached_tokens", "prompt_tokens_details", "input_tokens_details"),
        _tokens(fields, "completion_tokens", "output_tokens") or 0,
        _detail(fields, "reasoning_tokens", "completion_tokens_details", "output_tokens_details"),
    )


def _tokens(fields: Mapping[str, Any], *names: str) -> int | None:
    """Returns the first of these fields that exists."""
    found = next((fields[name] for name in names if name in fields), None)
    return found if isinstance(found, int) and found >= 0 else None


def _detail(fields: Mapping[str, Any], name: str, *where: str) -> int:
    found = [fields[each] for each in where if isinstance(fields.get(each), dict)]
    return (_tokens(found[0], name) or 0) if found else 0


def error_result(batch: Batch, line: Line, code: str, message: str) -> Result:
    """Returns the result of a line that got no answer."""
    error = json.dumps({"code": code, "message": message}).encode()
    return Result(_line(batch, line, b"null", error), False)


def _line(batch: Batch, line: Line, response: bytes, error: bytes) -> bytes:
    name = {
        "id": f"batch_req_{_digest(f'{batch.request.id}:{line.number}')}",
        "custom_id": line.custom_id,
    }
    head = json.dumps(name, separators=(",", ":")).encode()[:-1]
    return head + b',"response":' + response + b',"error":' + error + b"}"


def _one_line(body: bytes) -> bytes:
    content: Any = json.loads(body)
    return json.dumps(content, separators=(",", ":")).encode()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def pages_of(sizes: Mapping[int, int]) -> Iterator[Sequence[int]]:
    """Groups lines to read together: at least one, and further ones within the bounds."""
    page: list[int] = []
    total = 0
    for line, size in sizes.items():
        if page and (len(page) >= PAGE_LINES or total + size > PAGE_BYTES):
            yield page
            page, total = [], 0
        page.append(line)
        total += size
    yield page


class ResultFiles:
    """Makes a batch's files from its results; doing it again makes the same files."""

    def __init__(
        self,
        batch: Batch,
        batches: RedisBatches,
        files: RedisFiles,
        stores: TenantStores,
        now: int,
    ) -> None:
        self._batch, self._batches, self._files, self._now = batch, batches, files, now
        self._stores = stores

    async def write(self, done: Mapping[int, BatchResult], *, answered: bool) -> str | None:
        """Writes the file of all lines with an answer, or of those without; returns its id.

        None if there are no such lines.
        """
        lines = sorted(line for line, mark in done.items() if mark.answered is answered)
        if not lines:
            return None
        size = sum(done[line].size + 1 for line in lines)
        kind = "output" if answered else "error"
        request = self._batch.request
        file = StoredFile(
            id=f"file-{_digest(f'{request.id}:{kind}')}",
            tenant=request.tenant,
            filename=f"{request.id}_{kind}.jsonl",
            purpose=OUTPUT_PURPOSE,
            bytes=size,
            chunks=-(-size // CHUNK_BYTES),
            created_at=self._now,
            expires_at=self._now + request.output_ttl,
            models=self._batch.progress.models,
        )
        await self._stores.count(file.tenant, file_item(file))
        await self._files.add(file)
        async for number, piece in self._pieces(
            pages_of({line: done[line].size for line in lines})
        ):
            await self._files.write(file, [(number, piece)])
        await self._files.finish(file)
        return file.id

    async def _pieces(self, pages: Iterable[Sequence[int]]) -> AsyncIterator[tuple[int, bytes]]:
        number, gathered = 0, bytearray()
        for page in pages:
            for result in await self._batches.results(self._batch, page):
                gathered += result + b"\n"
            while len(gathered) >= CHUNK_BYTES:
                yield number, bytes(gathered[:CHUNK_BYTES])
                del gathered[:CHUNK_BYTES]
                number += 1
        if gathered:
            yield number, bytes(gathered)
