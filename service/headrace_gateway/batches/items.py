"""Files and batches as items of their tenant's store."""

from headrace_common.protocol.accounts import Item, ItemKind
from headrace_common.protocol.batches import BatchRequest, StoredFile, encode_record

from ..limits.tenant_stores import RECORD_BYTES

# The results of a batch are counted in steps of this many bytes.
STEP_BYTES = 2**20


def file_item(file: StoredFile) -> Item:
    return Item(ItemKind.FILE, file.id, file.bytes, file.expires_at * 1000)


def batch_item(request: BatchRequest, result_bytes: int = 0) -> Item:
    """Returns a batch with its results, which exist twice while they are written to files."""
    size = RECORD_BYTES + len(encode_record(request)) + 2 * result_bytes
    return Item(ItemKind.BATCH, request.id, size, request.kept_until * 1000)


def in_steps(result_bytes: int) -> int:
    """Rounds bytes up to the next step."""
    return -(-result_bytes // STEP_BYTES) * STEP_BYTES
