"""Which leases an engine has had: a number that Redis gives twice must not pass for a first run.

After a rollback of Redis an engine may get a request under an attempt that it used before. Its
gateway cannot tell the two histories apart by their sender, so the engine must ask before it runs.
"""

from collections import OrderedDict
from dataclasses import replace

from .base import Lease

REMEMBERED = 10_000


class LeaseMemory:
    """The newest attempt that this engine had of each of the last requests."""

    def __init__(self) -> None:
        self._attempts: OrderedDict[str, int] = OrderedDict()

    def check(self, lease: Lease) -> Lease:
        """The lease, `recovered` where this engine has had the attempt, or a later one, before."""
        rid = lease.request.request_id
        had = self._attempts.pop(rid, 0)
        self._attempts[rid] = max(had, lease.attempt)
        if len(self._attempts) > REMEMBERED:
            self._attempts.popitem(last=False)
        return replace(lease, recovered=True) if had >= lease.attempt else lease
