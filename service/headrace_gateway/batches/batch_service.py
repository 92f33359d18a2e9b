"""The operations of clients on files and batches, without HTTP: each is checked, then stored."""

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, StrictInt

from headrace_common.protocol.accounts import ItemKind
from headrace_common.protocol.batches import (
    Batch,
    BatchNotStored,
    BatchRequest,
    FileNotStored,
    StoredFile,
    batch_not_stored,
    file_not_stored,
)
from headrace_common.protocol.redis.batches import RedisBatches
from headrace_common.protocol.redis.files import RedisFiles, pieces

from ..errors import ApiError, invalid
from ..images.intake import ImageIntake
from ..images.uploads import IMAGE_PURPOSE
from ..limits.fields import Name
from ..limits.tenant_stores import TenantStores
from ..limits.tenants import ReadAccess
from ..limits.work import Work
from ..schemas.chat_messages import Body
from .items import batch_item, file_item
from .lines import ENDPOINTS

BATCH_PURPOSE = "batch"
# The purposes of files that clients may upload.
PURPOSES = (BATCH_PURPOSE, IMAGE_PURPOSE)
MAX_FILENAME_CHARS = 255
MAX_METADATA = 16
_WINDOW = re.compile(r"([1-9][0-9]{0,3})([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 86_400}
LONGEST_WINDOW_S = 7 * 86_400
SHORTEST_TTL_S = 3600


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: StrictInt = Field(ge=SHORTEST_TTL_S)


class CreateBatch(Body):
    """OpenAI's body. `completion_window` also accepts other times, such as 30m, 12h or 7d."""

    input_file_id: Name
    endpoint: Name
    completion_window: Name
    metadata: dict[Name, Name] | None = Field(None, max_length=MAX_METADATA)
    output_expires_after: ExpiresAfter | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchServiceLimits:
    """Seconds and counts. `file_ttl` is the longest time that a file is stored."""

    max_file_bytes: int
    file_ttl: int
    max_open_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A file that a client sends. `ttl` is the number of seconds to store it, None for the
    longest."""

    filename: str
    purpose: str
    content: bytes
    ttl: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchService:
    """Stores and finds files and batches for clients.

    `changed` is called for a new or a cancelled batch. `clock` gives Unix seconds of Redis.
    """

    files: RedisFiles
    batches: RedisBatches
    images: ImageIntake
    stores: TenantStores
    limits: BatchServiceLimits
    changed: Callable[[], None]
    clock: Callable[[], float]

    async def upload(self, upload: Upload, work: Work) -> StoredFile:
        """Stores a file of `work`'s tenant. Raises ApiError."""
        purpose, content, tenant = upload.purpose, upload.content, work.tenant
        if purpose not in PURPOSES:
            raise invalid(
                f"purpose: must be {' or '.join(map(repr, PURPOSES))}, not {purpose[:40]!r}.",
                param="purpose",
            )
        if not content:
            raise invalid("file: is empty.", param="file")
        if len(content) > self.limits.max_file_bytes:
            raise ApiError(
                413,
                f"file: has {len(content)} bytes, over the limit of {self.limits.max_file_bytes}.",
                param="file",
                code="request_too_large",
            )
        ttl, digest = self._ttl(upload.ttl), ""
        if purpose == IMAGE_PURPOSE:
            digest = (await self.images.check(content, "file", work)).hex()
        now = int(self.clock())
        parts = pieces(content)
        file = StoredFile(
            id=f"file-{secrets.token_hex(16)}",
            tenant=tenant,
            filename=upload.filename[:MAX_FILENAME_CHARS] or "file",
            purpose=purpose,
            bytes=len(content),
            chunks=len(parts),
            created_at=now,
            expires_at=now + ttl,
            digest=digest,
        )
        await self.stores.occupy(tenant, file_item(file), "file")
        await self.files.add(file)
        await self.files.write(file, enumerate(parts))
        await self.files.finish(file)
        return file

    def _ttl(self, asked: int | None) -> int:
        if asked is None:
            return self.limits.file_ttl
        if not SHORTEST_TTL_S <= asked <= self.limits.file_ttl:
            raise invalid(
                f"expires_after: seconds must be from {SHORTEST_TTL_S} to {self.limits.file_ttl}.",
                param="expires_after",
            )
        return asked

    async def file(self, file_id: str, access: ReadAccess) -> StoredFile:
        """Returns a file that the caller may read. Raises ApiError."""
        try:
            file = await self.files.get(file_id, access.tenant)
            if not access.permits(file.tenant, file.models):
                raise file_not_stored(file_id)
        except FileNotStored as error:
            raise ApiError(404, f"{error}.", param="file_id", code=error.code) from error
        return file

    async def all_files(self, access: ReadAccess) -> list[StoredFile]:
        """Returns the files that the caller may read, newest first."""
        files = await self.files.all_of(access.tenant)
        return [file for file in files if access.permits(file.tenant, file.models)]

    async def batch(self, batch_id: str, access: ReadAccess) -> Batch:
        """Returns a batch that the caller may see. Raises ApiError."""
        try:
            batch = await self.batches.get(batch_id)
            if not _may_see(access, batch):
                raise batch_not_stored(batch_id)
        except BatchNotStored as error:
            raise ApiError(404, f"{error}.", param="batch_id", code=error.code) from error
        return batch

    async def all_batches(self, access: ReadAccess) -> list[Batch]:
        """Returns the batches that the caller may see, newest first."""
        batches = await self.batches.all_of(access.tenant)
        return [batch for batch in batches if _may_see(access, batch)]

    async def delete(self, file: StoredFile) -> None:
        """Deletes a file. A batch that has begun to read it continues."""
        await self.files.delete(file)
        await self.stores.vacate(file.tenant, (ItemKind.FILE,), file.id)

    async def create(self, access: ReadAccess, key_id: str, body: CreateBatch) -> Batch:
        """Stores a batch, which begins soon. Raises ApiError."""
        if body.endpoint not in ENDPOINTS:
            raise invalid(f"endpoint: must be one of {', '.join(ENDPOINTS)}.", param="endpoint")
        tenant, window = access.tenant, _window(body.completion_window)
        after = body.output_expires_after
        output_ttl = self._ttl(None if after is None else after.seconds)
        file = await self._input(body.input_file_id, access)
        if await self.batches.count_open(tenant) >= self.limits.max_open_batches:
            raise ApiError(
                429,
                f"There are {self.limits.max_open_batches} batches that have not ended, which is "
                "the limit; wait for one of them or cancel it.",
                kind="rate_limit_error",
                code="too_many_batches",
                retry_after=60.0,
            )
        now = int(self.clock())
        request = BatchRequest(
            id=f"batch_{secrets.token_hex(16)}",
            tenant=tenant,
            key_id=key_id,
            endpoint=body.endpoint,
            input_file_id=file.id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + window,
            output_ttl=output_ttl,
            kept_until=now + window + self.limits.file_ttl,
            metadata=body.metadata or {},
        )
        await self.stores.occupy(tenant, batch_item(request))
        batch = await self.batches.create(request)
        self.changed()
        return batch

    async def _input(self, file_id: str, access: ReadAccess) -> StoredFile:
        try:
            file = await self.file(file_id, access)
        except ApiError as error:
            message = f"input_file_id: {error.message}"
            raise invalid(message, param="input_file_id") from error
        if file.purpose != BATCH_PURPOSE:
            raise invalid(
                "input_file_id: must be a file with the purpose 'batch'.", param="input_file_id"
            )
        return file

    async def cancel(self, batch: Batch) -> Batch:
        """Requests the end of a batch; does nothing if it has ended."""
        if not batch.progress.status.final:
            await self.batches.cancel(batch)
            self.changed()
        return await self.batches.get(batch.request.id)


def _may_see(access: ReadAccess, batch: Batch) -> bool:
    progress = batch.progress
    models = progress.models or filter(None, [progress.model])  # models from an older leader
    return access.permits(batch.request.tenant, models)


def _window(text: str) -> int:
    found = _WINDOW.fullmatch(text)
    seconds = 0 if found is None else int(found[1]) * _SECONDS[found[2]]
    if not 0 < seconds <= LONGEST_WINDOW_S:
        raise invalid(
            "completion_window: must be a time of at most 7 days, as 24h, 30m or 7d.",
            param="completion_window",
        )
    return seconds
