"""The queue protocol in memory, for tests and one-process use: the scripts' rules in Python.

One MemoryBackend stands for one Redis; its gateways and engines must share an event loop. Requests,
frames and control messages go through the same bytes as on the wire.
"""

import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection

from headrace_common.errors import BackendUnavailable, FailureCode, RequestConflict
from headrace_common.protocol.accounts import Item
from headrace_common.protocol.base import (
    LOST_RESERVED_S,
    Outcome,
    Placement,
    Progress,
    QueueLimits,
    TakeBounds,
    Verdict,
)
from headrace_common.protocol.failures import ended_state
from headrace_common.protocol.ledger import AttemptUsage, UsageOutcome
from headrace_common.protocol.registry import RegisteredModel
from headrace_common.protocol.requests import fingerprint, priority_class, token_cost
from headrace_common.protocol.variants import EngineSide, is_comparison
from headrace_common.wire import keys
from headrace_common.wire.messages import (
    GenerateRequest,
    decode_request,
    encode_request,
    required_adapter,
)

from .fairness import OUTPUT, FairQueue, cost
from .ledger import how, usage_entry
from .placement import choose, first_own, free_at
from .records import Ending, Record, Taken
from .shards import Log, Round, Shard

SHARE = 16
LOW = 3
LOOK_AGAIN = 0.1  # seconds
SUSPECT, POISON = 2, 4
ALL = TakeBounds()


class MemoryBackend:
    """The data of Redis. `clock` gives Unix seconds; `available` False simulates an outage."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.available = True
        self.shards: defaultdict[tuple[str, int], Shard] = defaultdict(Shard)
        # a model's shards, and until when they are known
        self.kept: dict[str, tuple[int, float]] = {}
        numbers = itertools.count(1)
        self.frames: defaultdict[str, Log] = defaultdict(lambda: Log(numbers))
        self.controls: defaultdict[str, Log] = defaultdict(lambda: Log(numbers))
        self.gateways: dict[str, float] = {}
        self.models: dict[str, tuple[RegisteredModel, bytes]] = {}
        self.models_store = ""
        self.adapter_sets: dict[str, tuple[str, bytes]] = {}
        self.adapter_reports: dict[tuple[str, str], bytes] = {}
        self.stored: dict[str, tuple[float, str, bytes]] = {}
        self.presence_until: dict[str, float] = {}
        self.readers: defaultdict[str, set[str]] = defaultdict(set)
        self.accounts: defaultdict[str, dict[str, Item]] = defaultdict(dict)
        self.salt = b""

    def check(self) -> None:
        """Raises BackendUnavailable during an outage."""
        if not self.available:
            raise BackendUnavailable("memory: the backend is switched off")

    def gateway_alive(self, gateway_id: str) -> bool:
        self.check()
        return self.gateways.get(gateway_id, 0.0) > self.clock()

    def shards_of(self, model: str) -> list[Shard]:
        """The model's shards that may contain something."""
        count, until = self.kept.get(model, (1, 0.0))
        return [self.shard(model, n) for n in range(count if until > self.clock() else 1)]

    def shard(self, model: str, number: int = keys.DEFAULT_SHARD) -> Shard:
        self.check()
        shard = self.shards[model, number]
        now = self.clock()
        for rid in [rid for rid, r in shard.records.items() if r.expires <= now]:
            self._remove_waiting(shard, rid)
            del shard.records[rid]
        return shard

    @staticmethod
    def _remove_waiting(shard: Shard, request_id: str) -> None:
        for priority, queue in shard.waiting.items():
            queue.remove(request_id)
            shard.placed.remove(priority, shard.records[request_id].placed, request_id)

    async def wake(self, shard: Shard) -> None:
        async with shard.changed:
            shard.changed.notify_all()

    # The scripts

    def admit(
        self,
        request: GenerateRequest,
        gateway: str,
        limits: QueueLimits,
        seen: int | None,
        polite: bool,
        placement: Placement | None = None,
        *,
        disputed: bool = False,
        left: float,
    ) -> tuple[Record | None, str]:
        """ADMIT, `left` seconds before the deadline.

        Returns (record, former gateway, "following" or "new");
        (None, "" or "tenant") if the queue is full, for all or for the tenant.

        Raises RequestConflict.
        """
        shard = self.shard(request.model, keys.shard_of(request.request_id))
        record = shard.records.get(request.request_id)
        if record is not None:
            if left > 0 and record.goes_on(gateway, seen, disputed=disputed):
                return self._go_on(shard, record, request, gateway, seen, polite=polite, left=left)
            if polite and not record.ended and record.gateway != gateway:
                record.given = True
                return record, "following"
            attached = self._attach(record, request, gateway)
            record.given = record.given or (record.state == "done" and seen is None)
            return attached
        tokens = token_cost(request)
        waiting, held = self.waiting(shard)
        if seen is None and limits.refuse(waiting, held, tokens):
            return None, ""
        most = limits.max_tenant_requests
        if seen is None and 0 < most <= self.waiting_of(shard, request.tenant):
            return None, "tenant"
        record = self._record(request, gateway, seen, left)
        shard.records[request.request_id] = record
        queue = shard.waiting[record.priority]
        if placement is not None:
            record.placed = choose(placement, _running(shard), waiting, shard.placed)
            record.hold = placement.hold_ms / 1000
        queue.add(request.request_id, record.tenant)
        if record.placed:
            shard.placed.add(record.priority, record.placed, request.request_id)
            shard.wakeups += queue.blocked(request.request_id)
        return record, "new"

    def _go_on(
        self,
        shard: Shard,
        record: Record,
        request: GenerateRequest,
        gateway: str,
        seen: int | None,
        *,
        polite: bool,
        left: float,
    ) -> tuple[Record | None, str]:
        """Queues an ended request again, or leaves that to its gateway."""
        now = self.clock()
        if record.fingerprint != fingerprint(request):
            raise _conflict(request)
        if polite and record.gateway != gateway and now - record.lost_at < LOST_RESERVED_S:
            record.given = True
            return record, "following"
        record.go_on(gateway, encode_request(request), now, seen, left)
        shard.waiting[record.priority].add(request.request_id, record.tenant)
        return record, "new"

    def _record(
        self, request: GenerateRequest, gateway: str, seen: int | None, left: float
    ) -> Record:
        now = self.clock()
        return Record(
            payload=encode_request(request),
            fingerprint=fingerprint(request),
            priority=priority_class(request.priority),
            deadline=now + left,
            tokens=token_cost(request),
            prompt_tokens=len(request.prompt_token_ids),
            tenant=request.tenant,
            weight=request.tenant_weight,
            gateway=gateway,
            admitted=now,
            attempt=seen or 0,
            keep=request.keep_ms / 1000,
            key=request.key,
            entered=not is_comparison(request),
            adapter=request.lora or "",
            required=required_adapter(request),
            variant=request.variant,
            expires=now + left + keys.GRACE_MS / 1000,
        )

    @staticmethod
    def _attach(
        record: Record, request: GenerateRequest, gateway: str
    ) -> tuple[Record | None, str]:
        if record.fingerprint != fingerprint(request):
            raise _conflict(request)
        former = ""
        if not record.ended and record.gateway != gateway:
            former = record.gateway
            record.former.append(former)
            record.gateway = gateway
        return record, former

    def waiting(self, shard: Shard) -> tuple[int, int]:
        """The number of waiting requests, and their tokens."""
        ids = [rid for queue in shard.waiting.values() for rid in queue]
        return len(ids), sum(shard.records[rid].tokens for rid in ids)

    def waiting_of(self, shard: Shard, tenant: str) -> int:
        """The number of a tenant's waiting requests."""
        ids = [rid for queue in shard.waiting.values() for rid in queue]
        return sum(shard.records[rid].tenant == tenant for rid in ids)

    def take(
        self,
        shard: Shard,
        engine: str,
        count: int,
        room: int | None,
        adapters: Collection[str] = (),
        side: EngineSide | None = None,
        bounds: TakeBounds = ALL,
        low_priority: int | None = None,
    ) -> Round:
        """TAKE."""
        most = math.inf if room is None else room
        turn = Round(engine, count, most, {"", *adapters}, bounds)
        turn.side = side or turn.side
        turn.low_room = low_priority
        for priority in (2, 3):
            share = min(shard.due[priority] // SHARE, turn.left)
            self._take(shard, priority, share, turn)
            shard.due[priority] -= max(0, share) * SHARE
        for priority in (1, 2, 3):
            before = len(turn.taken)
            empty = self._take(shard, priority, turn.left, turn)
            for lower in range(priority + 1, 4):
                shard.due[lower] += len(turn.taken) - before
            if empty and priority in shard.due:
                shard.due[priority] = 0
        for queue in shard.waiting.values():
            queue.keep_head()
        if turn.lacking and not turn.stopped:
            turn.stopped, turn.free_at = True, self.clock() + LOOK_AGAIN
        return turn

    def _take(self, shard: Shard, priority: int, most: int, turn: Round) -> bool:
        """Takes from one class while there is room; returns whether that emptied it."""
        queue, end = shard.waiting[priority], len(turn.taken) + most
        while len(turn.taken) < end and not turn.stopped and priority not in turn.lacking:
            rid = queue.first()
            if rid is None:
                return True
            self._deal(shard, queue, rid, turn)
        return False

    def _deal(self, shard: Shard, queue: FairQueue, rid: str, turn: Round) -> None:
        """Handles the next request of a class."""
        record = shard.records[rid]
        if record.deadline <= self.clock():
            self._remove_placed(shard, rid)
            turn.endings.append(self._fail(shard, queue.pop(), FailureCode.DEADLINE, False))
        elif record.priority == LOW and turn.low_room == 0:
            turn.lacking.add(LOW)
        elif not turn.takes(record, self.clock()):
            self._leave_to_others(shard, queue, turn)
        elif record.placed not in ("", turn.engine) and self._gives_way(shard, rid, turn):
            return
        elif record.prompt_tokens > turn.room:
            turn.stopped = True
        else:
            turn.room -= record.prompt_tokens
            self._remove_placed(shard, rid)
            shard.counters.serve(record.tenant, cost(record.prompt_tokens, record.weight))
            taken = self._lease(queue.pop(), record, turn.engine, turn.side, suspect=False)
            turn.taken.append(taken)
            if turn.low_room is not None and record.priority == LOW:
                turn.low_room -= 1

    def _leave_to_others(self, shard: Shard, queue: FairQueue, turn: Round) -> None:
        """Takes the next request that the engine takes before the first, or nothing more."""
        now = self.clock()
        able = [r for r in queue.listed() if turn.takes(shard.records[r], now)]
        if able:
            queue.pass_over(able[0])
        elif any(turn.takes(shard.records[r], now) for r in queue.unread()):
            queue.rotate()
        else:
            turn.lacking.add(shard.records[queue.first() or ""].priority)

    @staticmethod
    def _remove_placed(shard: Shard, rid: str) -> None:
        record = shard.records[rid]
        shard.placed.remove(record.priority, record.placed, rid)

    def _gives_way(self, shard: Shard, rid: str, turn: Round) -> bool:
        """Whether the next request, which is placed with another engine, is not yet for this
        one."""
        record = shard.records[rid]
        queue = shard.waiting[record.priority]
        candidates = [
            (other, shard.records[other])
            for other in shard.placed.first(record.priority, turn.engine)
            if queue.blocked(other)
        ]
        own = first_own(record, candidates, turn.room, shard.counters)
        if own is not None:
            record.passes += 1
            queue.pass_over(own)
            return True
        oldest = [shard.records[other].admitted for other in queue.oldest()]
        free = free_at(record, oldest)
        if free <= self.clock():
            return False
        turn.stopped, turn.free_at = True, free
        return True

    def _lease(
        self, rid: str, record: Record, engine: str, side: EngineSide, *, suspect: bool
    ) -> Taken:
        fresh = record.state == "queued"
        recovered = record.attempt > 0 or not fresh
        foreign = recovered and _with_other_weights(record, side)
        if not recovered:
            record.variant, record.weights = side.variant, side.weights
        record.attempt += 1
        record.state, record.owner, record.executing = "running", engine, False
        record.consumer = engine
        record.beaten = self.clock()
        if record.attempt == 1 and not recovered:
            record.writer = f"{engine}/1"
        placed = record.placed == engine if fresh and record.placed else None
        now = self.clock()
        return Taken(
            request_id=rid,
            attempt=record.attempt,
            gateway=record.gateway,
            recovered=recovered,
            suspect=suspect,
            payload=record.payload,
            placed=placed,
            waited=now - record.admitted,
            left=record.deadline - now,
            foreign=foreign,
            abandoned=foreign and not fresh and record.left_to_side,
        )

    def _fail(self, shard: Shard, rid: str, why: FailureCode, started: bool) -> Ending:
        record = shard.records[rid]
        record.state, record.why = "failed", why
        self._keep(record)
        if started:
            shard.count_ending(self.clock())
        self._enter(shard, rid, how(record), 0)
        return Ending(rid, record.attempt, record.gateway, why)

    def reap(
        self,
        shard: Shard,
        engine: str,
        count: int,
        lease: float,
        suspects: bool,
        adapters: Collection[str] = (),
        side: EngineSide | None = None,
        bounds: TakeBounds = ALL,
    ) -> tuple[list[Taken], list[Ending]]:
        """REAP."""
        side = side or EngineSide(alone=True)
        taken: list[Taken] = []
        endings: list[Ending] = []
        for rid, record in sorted(shard.started(), key=lambda item: item[1].priority):
            if len(taken) >= count:
                break
            if self.clock() - record.beaten < lease:
                continue
            if record.deadline <= self.clock():
                endings.append(self._fail(shard, rid, FailureCode.DEADLINE, True))
                continue
            held = not bounds.handed_over and bounds.hold
            if self.clock() - record.handed_over_at < held:
                continue
            if record.required not in ("", *adapters) or _is_left(record, side):
                continue
            failures = record.counted_failures
            if failures >= POISON:
                shard.dead_letters.append((rid, "poisoned", failures))
                endings.append(self._fail(shard, rid, FailureCode.POISONED, True))
            elif failures < SUSPECT or suspects:
                suspects = suspects and failures < SUSPECT
                record.failures, record.progress_at_take = failures, record.progress
                suspect = failures >= SUSPECT
                taken.append(self._lease(rid, record, engine, side, suspect=suspect))
        return taken, endings

    def owned(self, shard: Shard, rid: str, engine: str, attempt: int | None) -> Record | None:
        """The record if the engine owns the request in this attempt (None: any)."""
        record = shard.records.get(rid)
        if record is None or record.owner != engine:
            return None
        return record if attempt is None or record.attempt == attempt else None

    def beat(
        self, shard: Shard, engine: str, item: Progress
    ) -> tuple[Verdict, str, tuple[int, ...]]:
        """BEAT."""
        if item.request_id not in shard.records:
            return Verdict.MISSING, "", item.journaled
        record = self.owned(shard, item.request_id, engine, item.attempt)
        if record is None:
            return Verdict.STOLEN, "", item.journaled
        if record.state == "cancelled":
            return Verdict.CANCELLED, "", item.journaled
        if record.ended:
            return Verdict.STOLEN, "", item.journaled
        record.beaten = self.clock()
        if item.executing and not record.executing:
            record.executing = True
            record.usage[record.attempt] = item.usage
        verdict = Verdict.EXPIRED if record.deadline <= self.clock() else Verdict.OWNED
        if record.writer != f"{engine}/{item.attempt}":
            return verdict, record.gateway, item.journaled
        before, counts = record.progress, record.write_journal(item)
        if record.progress > before:
            record.usage[record.attempt] = item.usage
        _charge(shard, record, before, record.progress)
        return verdict, record.gateway, counts

    def release(
        self,
        shard: Shard,
        rid: str,
        engine: str,
        attempt: int | None,
        own: bool,
        for_own_side: bool = False,
        handed_over: bool = False,
    ) -> bool:
        """GIVEBACK."""
        record = self.owned(shard, rid, engine, attempt)
        if record is None or record.state != "running":
            return False
        record.beaten = -math.inf
        if own:
            record.owner, record.executing = "", False
        if for_own_side:
            record.left_to_side = True
        if handed_over:
            record.handed_over_at = self.clock()
        shard.wakeups += 1
        return True

    def finish(
        self,
        shard: Shard,
        rid: str,
        engine: str,
        attempt: int,
        outcome: Outcome,
        usage: AttemptUsage,
    ) -> bool:
        """FINISH."""
        record = self.owned(shard, rid, engine, attempt)
        if record is None:
            return False
        state = ended_state(outcome)
        if record.ended:
            return record.state == state
        record.state, record.outcome = state, outcome
        record.usage[attempt] = usage
        record.why = outcome.failed.failure if outcome.failed else None
        if record.why is FailureCode.LOST:
            record.lost_at = self.clock()
        output = sum(len(choice.token_ids) for choice in outcome.choices)
        _charge(shard, record, record.progress, output)
        self._end(shard, record)
        self._enter(shard, rid, how(record), output)
        return True

    def cancel(self, shard: Shard, rid: str, given: int | None = None) -> str:
        """CANCEL: returns the engine to tell, or ""."""
        record = shard.records.get(rid)
        if record is None:
            return ""
        if record.ended and given is not None and not (record.state == "done" and record.keep):
            record.given_tokens = given
            self._enter(shard, rid, how(record), given, always=False)
        if record.undecided:
            record.state, record.why, record.outcome = "cancelled", FailureCode.CANCELLED, None
            return ""
        if not record.ended:
            self._remove_waiting(shard, rid)
            record.state, record.why = "cancelled", FailureCode.CANCELLED
            self._end(shard, record)
            record.given_tokens = record.given_tokens if given is None else given
            expired = record.deadline <= self.clock()
            outcome = UsageOutcome.EXPIRED if expired else UsageOutcome.CANCELLED
            self._enter(shard, rid, outcome, given or 0)
        return record.owner if record.state == "cancelled" else ""

    def note_given(self, shard: Shard, rid: str, given: int) -> None:
        """GIVEN."""
        record = shard.records.get(rid)
        if record is None:
            return
        record.given_tokens = given
        if record.ended:
            self._enter(shard, rid, how(record), given, always=False)

    def _enter(
        self, shard: Shard, rid: str, outcome: UsageOutcome, output: int, *, always: bool = True
    ) -> None:
        record, model = shard.records[rid], decode_request(shard.records[rid].payload).model
        entry = usage_entry(model, rid, record, outcome, output, self.clock(), always=always)
        if entry is not None:
            shard.ledger.append(entry)

    def forget(self, shard: Shard, rid: str) -> None:
        """Lets the record of an ended request expire; until then its engine may repeat commands."""
        record = shard.records.get(rid)
        if record is not None:
            record.expires = self.clock() + keys.FORGOTTEN_MS / 1000

    def _end(self, shard: Shard, record: Record) -> None:
        record.journal = []
        self._keep(record)
        shard.count_ending(self.clock())

    def _keep(self, record: Record) -> None:
        record.expires = self.clock() + max(keys.ENDED_TTL_MS / 1000, record.keep)

    def wipe(self) -> None:
        """Loses all data, like an emptied Redis; readers and waiters stay connected."""
        for shard in self.shards.values():
            shard.records.clear()
            shard.dead_letters.clear()
            shard.ledger.clear()
            shard.statuses.clear()
            shard.images.clear()
            shard.image_tenants.clear()
            shard.image_requests.clear()
            shard.canary_plan = None
            shard.side_beats.clear()
            shard.clear()
        for log in (*self.frames.values(), *self.controls.values()):
            log.items.clear()
        self.gateways.clear()
        self.kept.clear()
        self.models.clear()
        self.models_store = ""
        self.adapter_sets.clear()
        self.adapter_reports.clear()
        self.stored.clear()
        self.presence_until.clear()
        self.accounts.clear()
        self.readers.clear()
        self.salt = b""


def _charge(shard: Shard, record: Record, before: int, after: int) -> None:
    """Counts output tokens, of which `before` were counted already."""
    tokens = cost(OUTPUT * after, record.weight) - cost(OUTPUT * before, record.weight)
    shard.counters.charge(record.tenant, tokens)


def _is_left(record: Record, side: EngineSide) -> bool:
    """Whether a started request waits for its own side."""
    if record.variant == side.variant:
        return False
    pinned = record.left_to_side and side.canary_wanted
    return not side.alone or pinned and _with_other_weights(record, side)


def _with_other_weights(record: Record, side: EngineSide) -> bool:
    """Whether an engine of this side would continue it with other weights."""
    return record.variant != side.variant and (not side.weights or side.weights != record.weights)


def _conflict(request: GenerateRequest) -> RequestConflict:
    return RequestConflict(f"request id {request.request_id} is in use for another request")


def _running(shard: Shard) -> dict[str, int]:
    """The running requests of each engine."""
    return Counter(record.consumer for _, record in shard.started())
