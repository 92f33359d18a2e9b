"""Snapshots of a batch: which phase each sequence is in, and what the last step computed."""

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.batch_snapshot import SequenceProgress
from headrace_testing.engine import Rig, make_config, make_request, make_rig


def params(max_tokens: int | None = 4, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True)


def progress(rig: Rig) -> dict[str, SequenceProgress]:
    return {
        f"{one.request_id}{one.choice or ''}": one for one in rig.scheduler.snapshot(64).sequences
    }


def test_a_sequence_goes_from_waiting_through_its_prefill_to_decode() -> None:
    rig = make_rig(make_config(max_num_batched_tokens=8))
    rig.add(make_request("a", range(1, 21), params=params(9)))
    seen = []
    for _ in range(4):
        one = progress(rig)["a"]
        seen.append((one.phase, one.computed, one.step_tokens, one.output))
        rig.step()
    assert seen == [
        ("waiting", 0, 0, 0),
        ("prefill", 8, 8, 0),
        ("prefill", 16, 8, 0),
        ("decode", 20, 4, 1),
    ]
    assert (one.prompt, one.max_output) == (20, 9)


def test_a_preempted_sequence_is_seen_and_prefills_again() -> None:
    rig = make_rig(make_config(enable_prefix_caching=False), num_blocks=6)
    rig.add(*(make_request(name, [k] * 8, params=params(12)) for k, name in enumerate("ab", 1)))
    phases = []
    while rig.scheduler.has_work:
        rig.step()
        phases.append(progress(rig)["b"].phase if "b" in progress(rig) else "ended")
    first = phases.index("preempted")
    assert set(phases[:first]) == {"decode"}
    assert phases[-1] == "ended" and "decode" in phases[first:]


def test_choices_share_blocks_of_their_prompt() -> None:
    rig = make_rig(make_config(max_num_batched_tokens=64))
    rig.add(make_request("a", range(1, 14), params=params(n=2)))
    rig.step(2)
    snapshot = rig.scheduler.snapshot(64)
    assert {one.choice: one.phase for one in snapshot.sequences} == {0: "decode", 1: "decode"}
    assert 0 < snapshot.blocks_shared < snapshot.stats.blocks_used


def test_a_snapshot_has_a_limited_number_of_sequences_running_ones_first() -> None:
    rig = make_rig(make_config(max_num_seqs=2))
    rig.add(*(make_request(name, [k] * 3, params=params(9)) for k, name in enumerate("abcd", 1)))
    rig.step()
    snapshot = rig.scheduler.snapshot(3)
    assert [one.request_id for one in snapshot.sequences] == ["a", "b", "c"]
    assert snapshot.left_out == 1


def test_without_max_tokens_the_context_is_the_bound() -> None:
    rig = make_rig(make_config(), num_blocks=6)
    rig.add(make_request("a", [1, 2, 3], params=params(None)))
    assert progress(rig)["a"].max_output == 6 * rig.scheduler.kv_cache.block_size - 3
