"""The attempts that an engine has had, so that a repeated attempt is not run as a new one.

After a rollback of Redis an engine may get a request under an attempt that it used before. The
gateway cannot distinguish the two histories by their sender, so the engine must ask before it runs.
"""

from collections import OrderedDict
from dataclasses import replace

from .base import Lease

REMEMBERED = 10_000


class AttemptHistory:
    """The newest attempt that this engine had of each recent request."""

    def __init__(self) -> None:
        self._attempts: OrderedDict[str, int] = OrderedDict()

    def check(self, lease: Lease) -> Lease:
        """The lease, marked `recovered` if this engine has already had this attempt or a later
        one."""
        rid = lease.request.request_id
        had = self._attempts.pop(rid, 0)
        self._attempts[rid] = max(had, lease.attempt)
        if len(self._attempts) > REMEMBERED:
            self._attempts.popitem(last=False)
        return replace(lease, recovered=True) if had >= lease.attempt else lease
