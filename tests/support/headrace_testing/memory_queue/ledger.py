"""Entries of the ledger in memory, by the same rules as lua/ledger.lua."""

from headrace_common.errors import FailureCode
from headrace_common.protocol.failures import CALLED_OFF
from headrace_common.protocol.ledger import UsageEntry, UsageOutcome

from .records import Record

_BY_FAILURE = {
    FailureCode.DEADLINE: UsageOutcome.EXPIRED,
    FailureCode.POISONED: UsageOutcome.DEAD_LETTERED,
}


def how(record: Record) -> UsageOutcome:
    """How an ended request is called in its entry."""
    if record.state == "done":
        return UsageOutcome.FINISHED
    if record.state == "cancelled" or record.why in CALLED_OFF:
        return UsageOutcome.CANCELLED
    return _BY_FAILURE.get(record.why or FailureCode.INTERNAL, UsageOutcome.FAILED)


def usage_entry(
    model: str,
    rid: str,
    record: Record,
    outcome: UsageOutcome,
    output: int,
    now: float,
    *,
    always: bool,
) -> UsageEntry | None:
    """The next entry of a request; None if it has none, or nothing new."""
    if not record.entered:
        return None
    answered = outcome is UsageOutcome.FINISHED
    if record.given_tokens is not None:
        output, answered = record.given_tokens, False
    elif outcome is not UsageOutcome.FINISHED:
        output = max(output, record.progress, record.sums[2])
    answered = answered or output > 0
    used = record.usage.values()
    cached = max((each.cached_tokens for each in used), default=0)
    sums = (
        record.prompt_tokens if answered else 0,
        min(cached, record.prompt_tokens) if answered else 0,
        output,
        sum(each.engine_ms for each in used),
        sum(each.kv_byte_seconds for each in used),
    )
    if not always and (sums[0], sums[2]) == (record.sums[0], record.sums[2]):
        return None
    news = [now_ - before for now_, before in zip(sums, record.sums, strict=True)]
    part, record.sums = record.entries, sums
    record.entries += 1
    return UsageEntry(
        request_id=rid,
        part=part,
        model=model,
        key=record.key,
        tenant=record.tenant,
        adapter=record.adapter,
        outcome=outcome,
        prompt_tokens=news[0],
        cached_tokens=news[1],
        output_tokens=news[2],
        engine_ms=news[3],
        kv_byte_seconds=news[4],
        attempts=record.attempt,
        accepted_ms=int(record.admitted * 1000),
        ended_ms=int(now * 1000),
    )
