"""Fair shares between tenants: the virtual token counter.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2: the tenant that
has received the fewest tokens is next. While two tenants both wait, their received tokens differ
by at most 2 * max(input_weight * longest prompt, output_weight * tokens of the KV cache).
"""

from collections.abc import Mapping
from typing import ClassVar

from ...core.errors import ConfigError
from ...core.request import EngineRequest, Sequence
from ...core.step_plan import SchedulerOutput
from ..request_queue import Queue, Rank, TenantQueues
from .base import Policy
from .options import above_zero, number

PRUNE_AT = 1024


class Fair(Policy):
    """Shares tokens between tenants in proportion to `weights`.

    A tenant that is not named has the weight that its requests carry.

    A tenant is charged for the prompt tokens that were not cached when its request started, and for
    output tokens as they come, but not for recomputation after a preemption. Within a tenant the
    order is first come, first served. Taking the next sequence costs
    O(log(tenants) + log(waiting)), amortised over charges.
    """

    name: ClassVar[str] = "fair"
    dynamic: ClassVar[bool] = True

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        input_weight: float = 1.0,
        output_weight: float = 2.0,
    ) -> None:
        if not isinstance(weights or {}, Mapping):
            raise ConfigError(
                f"policy_options: weights must map tenants to numbers, not {weights!r:.60}"
            )
        self._weights = {
            str(tenant): above_zero(f"weights[{tenant}]", weight)
            for tenant, weight in (weights or {}).items()
        }
        self._input_weight = number("input_weight", input_weight)
        self._output_weight = number("output_weight", output_weight)
        self._counters: dict[str, float] = {}
        self._unfinished: dict[str, int] = {}
        self._queue = TenantQueues(self.counter)
        self._prune_at = PRUNE_AT

    def counter(self, tenant: str) -> float:
        """Weighted tokens that a tenant received. Never falls while the tenant is remembered."""
        return self._counters.get(tenant, 0.0)

    def key(self, request: EngineRequest, order: int) -> Rank:
        return (request.arrival, order)

    def queue(self) -> Queue:
        return self._queue

    def rank(self, request: EngineRequest, key: Rank) -> Rank:
        return (self.counter(request.tenant), *key)

    def arrived(self, request: EngineRequest) -> None:
        """Lifts the counter of a tenant that was idle: idle time earns no credit."""
        tenant = request.tenant
        self._unfinished[tenant] = self._unfinished.get(tenant, 0) + 1
        if not self._queue.has(tenant):
            floor = self._floor()
            self._counters[tenant] = max(self.counter(tenant), floor)
            self._prune(floor)

    def admitted(self, sequence: Sequence, tokens: int) -> None:
        self._charge(sequence.request, self._input_weight * tokens)

    def stepped(self, scheduler_output: SchedulerOutput) -> None:
        for item in scheduler_output.scheduled:
            made = len(item.sequence.token_ids) - item.start - item.length
            if item.samples and made:
                self._charge(item.sequence.request, self._output_weight * made)

    def gone(self, request: EngineRequest) -> None:
        left = self._unfinished[request.tenant] - 1
        if left:
            self._unfinished[request.tenant] = left
        else:
            del self._unfinished[request.tenant]

    def _charge(self, request: EngineRequest, tokens: float) -> None:
        tenant = request.tenant
        weight = self._weights.get(tenant, request.tenant_weight)
        self._counters[tenant] = self.counter(tenant) + tokens / weight

    def _floor(self) -> float:
        """The smallest counter of waiting tenants, or that of the last tenant that waited."""
        first = self._queue.first_tenant()
        if first is None:
            first = self._queue.last_emptied
        return 0.0 if first is None else self.counter(first)

    def _prune(self, floor: float) -> None:
        """Forgets idle tenants whose counters would be lifted anyway when they return."""
        if len(self._counters) < self._prune_at:
            return
        self._counters = {
            tenant: counter
            for tenant, counter in self._counters.items()
            if counter > floor or tenant in self._unfinished or tenant == self._queue.last_emptied
        }
        self._prune_at = max(PRUNE_AT, 2 * len(self._counters))
