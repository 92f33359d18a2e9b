"""The scheduling benchmark on a few requests: its arithmetic, its waste, its files."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

import scheduling
from headrace_cli.bench.workload import Range
from headrace_engine.scheduler.policies import POLICIES
from headrace_operator.simulation.engine_profile import EngineProfile, load_profile
from virtual_time.batching import Batched, Continuous
from virtual_time.comparison import Comparison
from virtual_time.jobs import exactly, mixed, plain
from virtual_time.measures import jain, max_min, summary
from virtual_time.run import VirtualEngine

PROFILE = EngineProfile(
    name="test",
    prefill_tokens_per_second=1000.0,
    decode_step={1: 0.01, 4: 0.01},
    max_num_seqs=4,
    max_num_batched_tokens=8192,
    kv_tokens=4096,
    cold_start_seconds=1.0,
)


@pytest.mark.parametrize(
    ("outputs", "waste"), [((50, 200, 30, 150), 370 / 800), ((10, 10), 0.0), ((1, 9), 8 / 18)]
)
def test_a_static_batch_wastes_the_computed_number_of_slots(
    outputs: list[int], waste: float
) -> None:
    assert Comparison(profile=PROFILE).static_waste(outputs) == pytest.approx(waste)


def test_continuous_batching_wastes_no_slot() -> None:
    log = VirtualEngine(PROFILE, Continuous(), exactly([50, 200, 30, 150])).run()
    assert log.output_waste == 0.0
    assert log.computed_slots == log.useful_slots


def test_a_step_takes_its_decodes_and_its_prompt_tokens() -> None:
    log = VirtualEngine(PROFILE, Continuous(), plain(1, Range(100, 100), Range(11, 11))).run()
    assert log.seconds == pytest.approx(0.1 + 10 * 0.01)
    assert log.tokens["r0"] == pytest.approx([0.1 + step * 0.01 for step in range(11)])


def test_a_static_batch_waits_until_it_is_full_and_pads_prompts_to_the_longest() -> None:
    jobs = plain(4, Range(50, 200), Range(10, 10), rate=1.0)
    log = VirtualEngine(PROFILE, Batched(4), jobs).run()
    longest = max(len(job.prompt) for job in jobs)
    (first,) = {times[0] for times in log.tokens.values()}
    assert first == pytest.approx(jobs[-1].arrival + 4 * longest / 1000)
    assert log.computed_slots == 4 * longest + 4 * 9


def test_a_dynamic_batch_starts_when_its_first_request_has_waited_long_enough() -> None:
    jobs = plain(4, Range(20, 20), Range(2, 2), rate=1.0)
    log = VirtualEngine(PROFILE, Batched(4, wait=0.25), jobs).run()
    waits = [log.tokens[job.name][0] - job.arrival for job in jobs]
    assert max(waits) == pytest.approx(0.25 + 0.02), "no other request came meanwhile"
    assert min(waits) == pytest.approx(0.02), "no other can come after the last"


def test_a_static_batch_reserves_the_longest_of_everything() -> None:
    log = VirtualEngine(PROFILE, Batched(2), exactly([2, 8])).run()
    assert log.reserved_seconds / log.seconds == pytest.approx(2 * (1 + 8))


def test_a_run_counts_the_requested_tokens() -> None:
    jobs = mixed(40, rate=20.0, patience=1e9, seed=3)
    profile = replace(PROFILE, max_num_batched_tokens=64, kv_tokens=2048)
    for policy in POLICIES:
        log = VirtualEngine(profile, Continuous(), jobs, policy).run()
        assert {name: len(times) for name, times in log.tokens.items()} == {
            job.name: job.output for job in jobs
        }
        assert summary(log)["kv_waste"] < 0.2


def test_jains_index() -> None:
    assert jain([1.0, 1.0, 1.0]) == pytest.approx(1.0)
    assert jain([3.0, 0.0, 0.0]) == pytest.approx(1 / 3)


def test_the_fair_allocation_never_exceeds_a_demand() -> None:
    assert max_min({"small": 2.0, "big": 100.0, "huge": 100.0}, 12.0) == {
        "small": 2.0,
        "big": 5.0,
        "huge": 5.0,
    }
    rng = random.Random(0)
    demands = {str(i): rng.uniform(0, 10) for i in range(9)}
    given = max_min(demands, 30.0)
    assert sum(given.values()) == pytest.approx(min(30.0, sum(demands.values())))
    assert all(given[tenant] <= demands[tenant] for tenant in demands)


def test_the_bundled_profile_is_readable() -> None:
    assert load_profile(scheduling.PROFILE).prefill_tokens_per_second > 0


def test_a_small_comparison_writes_its_table_json_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    scheduling.main(["--requests", "30", "--json", str(path), "--plots", str(tmp_path)])
    results = json.loads(path.read_text())
    assert results["static_waste"]["50,200,30,150"] == pytest.approx(0.4625)
    assert results["continuous_gain"]["requests"] == 30
    assert results["continuous_gain"]["over_static"] > 1.0
    runs = results["batching"]["runs"]
    assert list(runs) == ["static", "dynamic", "continuous", "continuous, chunked prefill"]
    assert runs["static"]["padding_share"] > 0.1
    assert runs["continuous"]["padding_share"] == 0.0
    chunked = runs["continuous, chunked prefill"]
    assert chunked["itl_ms_p99"] < runs["continuous"]["itl_ms_p99"]
    assert chunked["kv_waste"] < 0.04
    assert set(results["policies"]["runs"]) == set(POLICIES)
    printed = capsys.readouterr().out
    assert "46% of it is waste" in printed and "deadline" in printed
    for name in ("scheduling-batching.png", "scheduling-policies.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
