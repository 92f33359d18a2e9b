"""/v1/files: the files that batches read and write."""

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.datastructures import FormData, UploadFile

from headrace_common.protocol.batches import StoredFile
from headrace_common.protocol.redis.files import RedisFiles

from ...batches.batch_service import SHORTEST_TTL_S
from ...batches.views import file_body
from ...errors import invalid
from ...schemas.answers import DeletedFile, File, FilePage
from ..services import services_of
from .documents import answer_of
from .pages import page

MAX_FILES_LISTED = 10_000
FIELDS = frozenset({"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"})
_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "additionalProperties": False,
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": SHORTEST_TTL_S},
                    },
                }
            }
        },
    }
}

router = APIRouter()


@router.post("/v1/files", openapi_extra=_FORM, **answer_of(File))
async def upload_file(request: Request) -> dict[str, Any]:
    """Stores a JSON Lines file of requests for a batch."""
    services = services_of(request)
    batches = services.batches
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise invalid("Send the file as multipart/form-data.", param="file")
    async with request.form(max_files=1, max_fields=8) as form:
        upload, purpose = _fields(form)
        content = await upload.read()
        name = upload.filename or "file"
        ttl = _ttl(form)
    return file_body(await batches.upload(services.pipeline.tenant, name, purpose, content, ttl))


@router.get("/v1/files", **answer_of(FilePage))
async def list_files(
    request: Request,
    purpose: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_FILES_LISTED)] = MAX_FILES_LISTED,
    after: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """Returns the files, newest first unless the client asks otherwise."""
    services = services_of(request)
    files = [
        file
        for file in await services.batches.all_files(services.read_access)
        if purpose in (None, file.purpose)
    ]
    if order == "asc":
        files.reverse()
    return page(files, lambda file: file.id, file_body, after=after, limit=limit)


@router.get("/v1/files/{file_id}", **answer_of(File))
async def retrieve_file(file_id: str, request: Request) -> dict[str, Any]:
    """Returns a file's description."""
    services = services_of(request)
    return file_body(await services.batches.file(file_id, services.read_access))


@router.delete("/v1/files/{file_id}", **answer_of(DeletedFile))
async def delete_file(file_id: str, request: Request) -> dict[str, Any]:
    """Deletes a file. A batch that has begun with it continues."""
    services = services_of(request)
    batches = services.batches
    file = await batches.file(file_id, services.read_access)
    await batches.delete(file)
    return {"id": file.id, "object": "file", "deleted": True}


@router.get("/v1/files/{file_id}/content", response_class=Response)
async def retrieve_file_content(file_id: str, request: Request) -> Response:
    """Returns a file's bytes."""
    services = services_of(request)
    batches = services.batches
    file = await batches.file(file_id, services.read_access)
    return StreamingResponse(
        _content(batches.files, file),
        media_type="application/octet-stream",
        headers={"content-length": str(file.bytes)},
    )


async def _content(files: RedisFiles, file: StoredFile) -> AsyncIterator[bytes]:
    for number in range(file.chunks):
        yield await files.chunk(file, number)


def _fields(form: FormData) -> tuple[UploadFile, str]:
    unknown = sorted(set(form.keys()) - FIELDS)
    if unknown:
        raise invalid(
            f"Unknown field: '{unknown[0][:80]}'. Remove it.",
            param=unknown[0][:80],
            code="unknown_parameter",
        )
    upload, purpose = form.get("file"), form.get("purpose")
    if not isinstance(upload, UploadFile):
        raise invalid("file: a file is required.", param="file")
    if not isinstance(purpose, str):
        raise invalid("purpose: a purpose is required.", param="purpose")
    return upload, purpose


def _ttl(form: FormData) -> int | None:
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at" or not isinstance(seconds, str) or not seconds.isdecimal():
        raise invalid("expires_after: give anchor created_at and seconds.", param="expires_after")
    return int(seconds[:12])
