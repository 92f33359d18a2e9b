"""Fair shares between tenants: the virtual token counter.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2: whoever has the
smallest counter of tokens received is next. While two tenants both wait, what they receive
differs by at most 2 * max(input_weight * longest prompt, output_weight * tokens of the KV cache).
"""

from collections.abc import Mapping
from typing import ClassVar

from ..errors import ConfigError
from ..plan import StepPlan
from ..request import EngineRequest, Sequence
from ..waiting import LaneQueue, Queue, Rank
from .base import Policy
from .options import above_zero, number

PRUNE_AT = 1024


class Fair(Policy):
    """`weights`: shares of tenants, 1 for those not named: twice the weight, twice the tokens.

    Charged are the tokens that the engine computes for a tenant: prompt tokens that were not
    cached at admission, output tokens as they come. What is recomputed after a preemption is not
    charged. Within a tenant it is first come, first served. Taking the next one costs
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
            raise ConfigError(f"policy_options: weights must map tenants to numbers: {weights!r}")
        self._weights = {
            str(tenant): above_zero(f"weights[{tenant}]", weight)
            for tenant, weight in (weights or {}).items()
        }
        self._input_weight = number("input_weight", input_weight)
        self._output_weight = number("output_weight", output_weight)
        self._counters: dict[str, float] = {}
        self._unfinished: dict[str, int] = {}
        self._queue = LaneQueue(lambda request: request.tenant, self.counter)
        self._prune_at = PRUNE_AT

    def counter(self, tenant: str) -> float:
        """Weighted tokens that a tenant received, as far as they count; never falls."""
        return self._counters.get(tenant, 0.0)

    def key(self, request: EngineRequest, order: int) -> Rank:
        return (request.arrival, order)

    def queue(self) -> Queue:
        return self._queue

    def rank(self, request: EngineRequest, key: Rank) -> Rank:
        return (self.counter(request.tenant), *key)

    def arrived(self, request: EngineRequest) -> None:
        """A tenant that comes to wait has no credit for the time in which it asked for nothing."""
        tenant = request.tenant
        self._unfinished[tenant] = self._unfinished.get(tenant, 0) + 1
        if not self._queue.has(tenant):
            floor = self._floor()
            self._counters[tenant] = max(self.counter(tenant), floor)
            self._prune(floor)

    def admitted(self, sequence: Sequence, tokens: int) -> None:
        self._charge(sequence.request.tenant, self._input_weight * tokens)

    def stepped(self, plan: StepPlan) -> None:
        for item in plan.scheduled:
            made = len(item.sequence.token_ids) - item.start - item.length
            if item.samples and made:
                self._charge(item.sequence.request.tenant, self._output_weight * made)

    def gone(self, request: EngineRequest) -> None:
        left = self._unfinished[request.tenant] - 1
        if left:
            self._unfinished[request.tenant] = left
        else:
            del self._unfinished[request.tenant]

    def _charge(self, tenant: str, tokens: float) -> None:
        self._counters[tenant] = self.counter(tenant) + tokens / self._weights.get(tenant, 1.0)

    def _floor(self) -> float:
        """The smallest counter of those that wait, else that of the last one that did."""
        first = self._queue.first_lane()
        if first is None:
            first = self._queue.last_emptied
        return 0.0 if first is None else self.counter(first)

    def _prune(self, floor: float) -> None:
        """Forgets idle tenants that would be lifted to at least their counter when they return."""
        if len(self._counters) < self._prune_at:
            return
        self._counters = {
            tenant: counter
            for tenant, counter in self._counters.items()
            if counter > floor or tenant in self._unfinished or tenant == self._queue.last_emptied
        }
        self._prune_at = max(PRUNE_AT, 2 * len(self._counters))
