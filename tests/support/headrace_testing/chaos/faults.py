"""All faults by name, and the places of tests for faults that this harness does not inject."""

from collections.abc import Mapping

from .client_faults import CLIENT_FAULTS
from .crash_faults import CRASH_FAULTS
from .process_faults import PROCESS_FAULTS
from .redis_faults import REDIS_FAULTS
from .scene import Fault
from .update_faults import UPDATE_FAULTS

FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        *PROCESS_FAULTS,
        *UPDATE_FAULTS,
        *REDIS_FAULTS,
        *CLIENT_FAULTS,
        *CRASH_FAULTS,
    )
}

# Title and the files whose tests it has, relative to tests/.
ELSEWHERE: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "F19": ("a Redis that is not fit is refused", ("test_common/protocol/test_redis_backend.py",)),
    "F23": (
        "queue or tenant over its limits",
        (
            "test_gateway/limits/test_rate_limits.py",
            "test_common/protocol/test_fairness.py",
            "test_common/protocol/test_queue_admission.py",
        ),
    ),
    "F24": ("one idempotency key, many clients", ("test_e2e/test_resume.py",)),
    "F25": ("Last-Event-ID of every kind", ("test_gateway/resumable/test_resumable.py",)),
    "F27-operator": (
        "operator killed, API server away",
        ("test_operator/app/test_operator.py", "test_operator/cluster/test_lease.py"),
    ),
    "F29": ("state of a resumed request", ("test_chaos/test_faults.py: the cases of every fault",)),
    "F30": ("cancelled commands leave no reply", ("test_common/protocol/test_redis_backend.py",)),
    "F31": ("slow and never-reading clients", ("test_e2e/test_hostile_clients.py",)),
    "F32": ("random interleavings of scripts", ("test_common/protocol/test_scripts_stateful.py",)),
    "F33": (
        "KV blocks in random order",
        (
            "test_engine/scheduler/test_scheduler_stateful.py",
            "test_engine/kv_cache/test_block_pool.py",
        ),
    ),
    "input": (
        "requests that are wrong, too large or hostile",
        ("test_e2e/test_bad_input.py", "test_gateway/http/test_bad_input.py"),
    ),
    "http": (
        "broken HTTP, floods of connections, clients that leave at once",
        ("test_gateway/http/test_raw_http.py", "test_e2e/test_hostile_clients.py"),
    ),
    "messages": (
        "garbage written straight into Redis",
        ("test_e2e/test_hostile_clients.py", "test_common/protocol/test_frames.py"),
    ),
    "tenants": (
        "other tenants' requests, caches and timings",
        ("test_gateway/limits/test_rate_limits.py", "test_gateway/limits/test_tenants.py"),
    ),
    "keys": ("no key, a wrong one, every route", ("test_gateway/limits/test_api_keys.py",)),
    "files": (
        "models that bring code or leave their folder",
        ("test_engine/models/test_weights.py",),
    ),
}
