"""The last steps are kept, up to a fixed number."""

from headrace_engine.serving.step_log import StepLog
from headrace_testing.engine import make_request, make_rig


def test_a_record_tells_what_the_step_computed_and_left() -> None:
    rig, log = make_rig(), StepLog()
    rig.add(make_request("a", range(1, 11)))
    for number in range(2):
        rig.step()
        log.add(rig.scheduler.stats(), 0.5, 100.0 + number)

    prefill, decode = log.records()

    assert (prefill.step, prefill.prefill_tokens, prefill.decode_tokens) == (1, 10, 0)
    assert (decode.step, decode.prefill_tokens, decode.decode_tokens) == (2, 0, 1)
    assert (decode.running, decode.blocks_used, decode.ended) == (1, 3, 101.0)


def test_only_the_last_records_are_kept() -> None:
    rig, log = make_rig(), StepLog(size=3)
    for _ in range(10):
        log.add(rig.scheduler.stats(), 0.1, 0.0)

    assert [record.step for record in log.records()] == [8, 9, 10]
    assert log.steps == 10
