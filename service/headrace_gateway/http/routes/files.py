"""/v1/files: the files that batches read and write, and images.

OpenAI's and Anthropic's clients use the same paths; a header of the latter tells them apart.
"""

from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.datastructures import FormData, UploadFile

from headrace_common.protocol.batches import StoredFile
from headrace_common.protocol.redis.files import RedisFiles

from ...anthropic.errors import is_anthropics
from ...anthropic.files import deleted_info, file_info, page_info
from ...batches.batch_service import PURPOSES, SHORTEST_TTL_S, Upload
from ...batches.views import file_body
from ...errors import invalid
from ...images.uploads import IMAGE_PURPOSE
from ...schemas.answers import (
    AnthropicDeletedFile,
    AnthropicFile,
    AnthropicFilePage,
    DeletedFile,
    File,
    FilePage,
)
from ..services import services_of
from .documents import answer_of
from .pages import page

MAX_FILES_LISTED = 10_000
FIELDS = frozenset({"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"})
ANTHROPIC_FIELDS = frozenset({"file", "expires_in_seconds"})
_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file"],
                    "description": "OpenAI's clients must send `purpose`; Anthropic's send images.",
                    "additionalProperties": False,
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": list(PURPOSES)},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": SHORTEST_TTL_S},
                        "expires_in_seconds": {"type": "integer", "minimum": SHORTEST_TTL_S},
                    },
                }
            }
        },
    }
}

router = APIRouter()


@router.post("/v1/files", openapi_extra=_FORM, **answer_of(File | AnthropicFile))
async def upload_file(request: Request) -> dict[str, Any]:
    """Stores a JSON Lines file of requests for a batch, or an image for requests that name it."""
    services = services_of(request)
    batches = services.batches
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise invalid("Send the file as multipart/form-data.", param="file")
    async with request.form(max_files=1, max_fields=8) as form:
        read = _anthropic_fields if is_anthropics(request.scope) else _fields
        upload, purpose, ttl = read(form)
        sent = Upload(
            filename=upload.filename or "file",
            purpose=purpose,
            content=await upload.read(),
            ttl=ttl,
        )
    return _body(request)(await batches.upload(sent, services.pipeline.work))


@router.get("/v1/files", **answer_of(FilePage | AnthropicFilePage))
async def list_files(
    request: Request,
    purpose: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_FILES_LISTED)] = MAX_FILES_LISTED,
    after: str | None = None,
    after_page: Annotated[str | None, Query(alias="page")] = None,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    """Returns the files, newest first unless the client asks otherwise.

    Anthropic's clients name the page with `page`, others with `after`.
    """
    services = services_of(request)
    files = [
        file
        for file in await services.batches.all_files(services.read_access)
        if purpose in (None, file.purpose)
    ]
    if order == "asc":
        files.reverse()
    body, start = _body(request), after_page if after is None else after
    found = page(files, lambda file: file.id, body, after=start, limit=limit)
    return page_info(found) if is_anthropics(request.scope) else found


@router.get("/v1/files/{file_id}", **answer_of(File | AnthropicFile))
async def retrieve_file(file_id: str, request: Request) -> dict[str, Any]:
    """Returns a file's description."""
    services = services_of(request)
    return _body(request)(await services.batches.file(file_id, services.read_access))


@router.delete("/v1/files/{file_id}", **answer_of(DeletedFile | AnthropicDeletedFile))
async def delete_file(file_id: str, request: Request) -> dict[str, Any]:
    """Deletes a file. A batch that has begun with it continues."""
    services = services_of(request)
    batches = services.batches
    file = await batches.file(file_id, services.read_access)
    await batches.delete(file)
    if is_anthropics(request.scope):
        return deleted_info(file)
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


def _body(request: Request) -> Callable[[StoredFile], dict[str, Any]]:
    return file_info if is_anthropics(request.scope) else file_body


def _fields(form: FormData) -> tuple[UploadFile, str, int | None]:
    """Returns the file, its purpose, and for how many seconds it is to be stored."""
    upload, purpose = _file(form, FIELDS), form.get("purpose")
    if not isinstance(purpose, str):
        raise invalid("purpose: a purpose is required.", param="purpose")
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return upload, purpose, None
    if anchor != "created_at" or not isinstance(seconds, str) or not seconds.isdecimal():
        raise invalid("expires_after: give anchor created_at and seconds.", param="expires_after")
    return upload, purpose, int(seconds[:12])


def _anthropic_fields(form: FormData) -> tuple[UploadFile, str, int | None]:
    """Returns the same of a form of Anthropic's clients, whose files are images."""
    upload, seconds = _file(form, ANTHROPIC_FIELDS), form.get("expires_in_seconds")
    if seconds is None:
        return upload, IMAGE_PURPOSE, None
    if not isinstance(seconds, str) or not seconds.isdecimal():
        raise invalid("expires_in_seconds: give seconds.", param="expires_in_seconds")
    return upload, IMAGE_PURPOSE, int(seconds[:12])


def _file(form: FormData, known: frozenset[str]) -> UploadFile:
    unknown = sorted(set(form.keys()) - known)
    if unknown:
        raise invalid(
            f"Unknown field: '{unknown[0][:80]}'. Remove it.",
            param=unknown[0][:80],
            code="unknown_parameter",
        )
    upload = form.get("file")
    if not isinstance(upload, UploadFile):
        raise invalid("file: a file is required.", param="file")
    return upload
