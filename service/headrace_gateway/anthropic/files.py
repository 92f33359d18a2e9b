"""Files as Anthropic's clients see them."""

from collections.abc import Mapping
from datetime import UTC, datetime
from mimetypes import guess_type
from typing import Any

from headrace_common.protocol.batches import StoredFile


def file_info(file: StoredFile) -> dict[str, Any]:
    return {
        "type": "file",
        "id": file.id,
        "filename": file.filename,
        "mime_type": guess_type(file.filename)[0] or "application/octet-stream",
        "size_bytes": file.bytes,
        "created_at": _time(file.created_at),
        "expires_at": _time(file.expires_at),
        "downloadable": True,
    }


def page_info(page: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a page of files that has OpenAI's form."""
    return {"data": page["data"], "next_page": page["last_id"] if page["has_more"] else None}


def deleted_info(file: StoredFile) -> dict[str, Any]:
    return {"type": "file_deleted", "id": file.id}


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
