"""All faults by name, and where those are tested that this harness does not inject."""

from collections.abc import Mapping

from .client_faults import CLIENT_FAULTS
from .process_faults import PROCESS_FAULTS
from .redis_faults import REDIS_FAULTS
from .scene import Fault

FAULTS: Mapping[str, Fault] = {
    fault.name: fault for fault in (*PROCESS_FAULTS, *REDIS_FAULTS, *CLIENT_FAULTS)
}

# Title and the files whose tests it has, relative to tests/.
ELSEWHERE: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "F19": ("a Redis that is not fit is refused", ("test_common/test_redis_backend.py",)),
    "F23": (
        "queue or tenant over its limits",
        ("test_gateway/test_rate_limits.py", "test_common/test_queue_contract.py"),
    ),
    "F24": ("one idempotency key, many clients", ("test_e2e/test_resume.py",)),
    "F25": ("Last-Event-ID of every kind", ("test_gateway/test_resumable.py",)),
    "F26": ("two protocol versions at once", ("test_common/test_redis_backend.py",)),
    "F29": ("state of a resumed request", ("test_chaos/test_faults.py: the cases of every fault",)),
    "F30": ("cancelled commands leave no reply", ("test_common/test_redis_backend.py",)),
    "F31": ("slow and never-reading clients", ("test_e2e/test_hostile_clients.py",)),
    "F32": ("random interleavings of scripts", ("test_common/test_scripts_stateful.py",)),
    "F33": (
        "KV blocks in random order",
        ("test_engine/test_scheduler_stateful.py", "test_engine/test_block_pool.py"),
    ),
}
