"""Files and batches in the form of OpenAI's API."""

from typing import Any

from headrace_common.protocol.batches import Batch, BatchProgress, BatchStatus, StoredFile

_ENDINGS = {
    BatchStatus.COMPLETED: "completed_at",
    BatchStatus.FAILED: "failed_at",
    BatchStatus.EXPIRED: "expired_at",
    BatchStatus.CANCELLED: "cancelled_at",
}


def file_body(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_body(batch: Batch) -> dict[str, Any]:
    request, progress = batch.request, batch.progress
    ended: dict[str, int | None] = dict.fromkeys(_ENDINGS.values())
    if progress.status in _ENDINGS:
        ended[_ENDINGS[progress.status]] = progress.ended_at
    return {
        "id": request.id,
        "object": "batch",
        "endpoint": request.endpoint,
        "model": progress.model,
        "errors": {"object": "list", "data": list(progress.errors)} if progress.errors else None,
        "input_file_id": request.input_file_id,
        "completion_window": request.completion_window,
        "status": batch.state,
        "output_file_id": progress.output_file_id,
        "error_file_id": progress.error_file_id,
        "created_at": request.created_at,
        "in_progress_at": progress.in_progress_at,
        "expires_at": request.expires_at,
        "finalizing_at": progress.finalizing_at,
        **ended,
        "cancelling_at": batch.cancelling_at,
        "request_counts": {
            "total": progress.total,
            "completed": progress.completed,
            "failed": progress.failed,
        },
        "usage": None if progress.in_progress_at is None else _usage(progress),
        "metadata": dict(request.metadata) or None,
    }


def _usage(progress: BatchProgress) -> dict[str, Any]:
    return {
        "input_tokens": progress.input_tokens,
        "input_tokens_details": {"cached_tokens": progress.cached_tokens},
        "output_tokens": progress.output_tokens,
        "output_tokens_details": {"reasoning_tokens": progress.reasoning_tokens},
        "total_tokens": progress.input_tokens + progress.output_tokens,
    }
