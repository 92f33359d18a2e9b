"""The GPU benchmark: every part on the CPU with a tiny model, the cost model, and the files that
remain when a part fails or hangs.
"""

import gc
import json
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu
import gpu_predicted
import gpu_report
from gpu_benchmark import engine as gpu_engine
from gpu_benchmark import parts as gpu_parts
from gpu_benchmark import process as gpu_process
from gpu_benchmark import sizes as gpu_sizes
from gpu_benchmark import steps as gpu_steps
from gpu_benchmark import table as gpu_table
from gpu_benchmark import task as gpu_task
from gpu_benchmark import tests as gpu_tests
from gpu_benchmark.shapes import (
    SHAPES,
    Job,
    Roofs,
    attention_operations,
    conversations,
    predicted_seconds,
)

ROOFS = Roofs(bandwidth=1e9, products=1e12)
WHERE = {"part": "steps", "model": "8b"}


def reports(out: Path) -> dict[str, dict[str, Any]]:
    return {one["what"]: dict(one) for one in gpu_table.read_results(out / "results.jsonl")}


def test_every_part_runs_and_reports_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # spares the collections between engines the visit of a million objects that pytest has made
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
    before, gradients = torch.get_num_threads(), torch.is_grad_enabled()
    place = gpu.Place(tmp_path / "out", tmp_path / "work", "tiny")
    gpu.begin(place)
    try:
        for plan in gpu.chosen(gpu.PLANS, "", "tiny"):
            part = gpu_parts.Part(plan.part, plan.model, place.out, place.work)
            gpu_parts.measure_part(part, gpu_sizes.TINY)
        profile = gpu_parts.Part("profile", "tiny", place.out, place.work)
        gpu_parts.measure_part(profile, gpu_sizes.TINY)
    finally:
        torch.set_num_threads(before)
        torch.set_grad_enabled(gradients)
    found = reports(place.out)
    for batch, context, _ in gpu_sizes.TINY.decodes:
        assert found[f"decode, batch {batch}, context {context}"]["share"] > 0
        gap = found[f"gap between decode steps, batch {batch}"]
        assert gap["value"] >= 0 and gap["top_kernels"][0]["us"] > 0
        assert "us a step" in gpu_table.kernels(gap)[0]
        step = f"decode step, batch {batch}, context {context}"
        assert found[step]["launches"] > 0 and found[f"{step}: {gpu_engine.OTHER}"]["value"] > 0
        lines = (place.work / f"profile-tiny-decode-{batch}.txt").read_text().splitlines()
        assert "kernel" in lines[0] and len(lines) > 10
        assert (place.work / f"trace-tiny-decode-{batch}.json").exists()
    for prompts, length in gpu_sizes.TINY.prefills:
        assert found[f"prefill, {prompts} of {length}"]["share"] > 0
    assert found[f"{gpu_sizes.TINY.requests} conversations at once"]["value"] > 0
    kinds = [one for what, one in found.items() if what.startswith("conversations, steps of")]
    assert len(kinds) > 1 and all(one["value"] > 0 and one["steps"] > 0 for one in kinds)
    assert found["transformers, static batches"]["value"] > 0
    assert found["transformers, generate_batch"]["value"] > 0
    for what in ("asynchronous", "graphs"):
        assert found[f"equal tokens with and without {what}"]["value"] == 4
        assert found[f"deterministic, equal tokens with and without {what}"]["value"] == 4
    assert found["attention, Llama 8B, bfloat16"]["value"] <= 2e-2
    assert found["deterministic, equal alone and among others"]["value"] == 4
    lora = found["LoRA, 2 adapters of rank 4, decode, batch 3, context 32"]
    assert lora["value"] > 0 and lora["adapters_cost"] > -1
    whole = gpu_table.read_results(place.out / "results.jsonl")
    assert {one["model"] for one in whole if one["what"] == "decode, batch 2, context 16"} == {
        "tiny-fp8", "tiny-int4", "tiny-moe",
    }  # fmt: skip
    assert all(gpu_table.row(one).startswith("tiny") for one in whole)
    assert len(gpu_table.ratios(whole)) == 2
    check_result_files(place)


def check_result_files(place: gpu.Place) -> None:
    """Checks that the results are few files in one folder, and that one of them contains the
    rest."""
    gpu_report.write_reports(place.out, {"steps:1b": "whole: said nothing for 60 s"})
    gpu.pack(place)
    names = {"results.jsonl", "report.json", "report.md", "summary.svg", "work.tar.gz"}
    assert {one.name for one in place.out.iterdir()} == names
    with tarfile.open(place.out / "work.tar.gz") as archive:
        assert "profile-tiny-decode-1.txt" in archive.getnames()
    text = (place.out / "report.md").read_text()
    for wanted in ("| tiny | 6 conversations at once |", "- steps:1b: whole: said", "<= 40.0 us"):
        assert wanted in text


def test_results_are_compared_with_an_earlier_run() -> None:
    line = {**WHERE, "what": "decode", "value": 4.0, "unit": "ms"}
    before = gpu_table.by_key([line, {**line, "value": 5.0}, {**WHERE, "what": "start"}])
    assert gpu_table.row(line, before).endswith("was 5.00 (-20.0 %)")
    assert "was" not in gpu_table.row({**line, "model": "1b"}, before)
    assert gpu_table.row({**line, "engine": {"enable_autotuner": False}}).endswith("(untuned)")


def test_parts_by_name() -> None:
    def names(only: str, sizes: str = "full") -> list[str]:
        return [plan.name for plan in gpu.chosen(gpu.PLANS, only, sizes)]

    assert names("serving,steps:moe") == ["roofs:8b", "serving:8b", "steps:moe"]
    assert names("equality", "small") == ["roofs:tiny", "equality:tiny"]
    with pytest.raises(SystemExit, match="--only serve: there are deterministic"):
        names("serve")
    # Figures with goals are measured even if all other parts fail.
    assert sum(plan.limit for plan in gpu.PLANS[:4]) < 450


def test_a_failed_part_is_retried_and_the_other_parts_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[tuple[str, str]] = []

    def run(plan: gpu.Plan, place: gpu.Place, left: float, kind: str) -> str | None:
        assert left <= 100.0
        tried.append((plan.name, kind))
        line = {"part": plan.part, "model": plan.model, "what": f"{plan.part} done", "value": 1.0}
        with (place.out / "results.jsonl").open("a") as file:
            file.write(json.dumps({**line, "unit": "x"}) + "\n")
        if plan.name == "steps:8b" and kind != "safe":
            return f"{gpu_process.FAILED} 1: no such kernel"
        if plan.part == "deterministic":
            return f"{gpu_process.SILENT} 9 s; in File x"
        return f"{gpu_process.LATE} 9 s" if plan.part == "serving" else None

    monkeypatch.setattr(gpu, "run", run)
    place = gpu.Place(tmp_path / "out", tmp_path / "work")
    assert gpu.measure(place, 100.0, gpu.PLANS, {}) == 3
    assert tried[:6] == [
        ("roofs:8b", "whole"), ("steps:8b", "whole"), ("steps:8b", "untuned"),
        ("steps:8b", "safe"), ("serving:8b", "whole"), ("peers:8b", "whole"),
    ]  # fmt: skip
    assert [kind for name, kind in tried if name == "deterministic:8b"] == ["whole", "safe"]
    problems = json.loads((tmp_path / "out" / "report.json").read_text())["problems"]
    assert problems["serving:8b"] == "whole: cut short after 9 s"
    assert problems["steps:8b"].endswith("no such kernel; safe: came to its end")
    assert "serving done" in capsys.readouterr().out


def test_existing_results_are_not_measured_again(tmp_path: Path) -> None:
    place = gpu.Place(tmp_path / "out", tmp_path / "work", "tiny")
    gpu.begin(place)
    (place.work / "roofs.json").write_text('{"bandwidth": 1e9, "products": 1e12}')
    for kind in ("whole", "safe"):
        part = gpu_parts.Part("steps", "tiny-moe", place.out, place.work, kind)
        gpu_parts.measure_part(part, gpu_sizes.TINY)
    lines = [one["what"] for one in gpu_table.read_results(place.out / "results.jsonl")]
    assert lines.count("start") == 2 and "decode, batch 2, context 16" in lines
    assert all(lines.count(one) == 1 for one in lines if one != "start")


HANGING = """
import faulthandler, time
from gpu_benchmark.process import WHERE
faulthandler.register(WHERE, all_threads=True)
def in_a_kernel():
    print("ready", flush=True)
    time.sleep(600)
in_a_kernel()
"""


def test_a_part_that_hangs_is_ended_with_a_stack_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, numbers = tmp_path / "log", iter(range(1 << 30))
    monkeypatch.setattr(gpu_process, "TELL_SECONDS", 60.0)

    def heard() -> int:
        """Output grows until the program hangs."""
        return -1 if "ready" in log.read_text() else next(numbers)

    def problem(program: str, seconds: float, silence: float) -> str | None:
        command, limits = [sys.executable, "-c", program], gpu_process.Limits(seconds, silence)
        return gpu_process.run_process(command, log, gpu.environment(), limits, heard)

    told = problem(HANGING, 600.0, 0.1)
    assert told is not None and told.startswith("said nothing for 0 s; ready")
    assert told.index("in File") < told.index("in_a_kernel") < told.index("<module>")
    failing = "print('out of memory', flush=True); raise SystemExit(3)"
    assert problem(failing, 600.0, 600.0) == "ended with 3: out of memory"
    assert problem("pass", 600.0, 600.0) is None
    late = problem("import time; time.sleep(600)", 0.05, 600.0)
    assert late == "cut short after 0 s"


def test_the_minimum_time_of_a_step() -> None:
    shape = SHAPES["8b"]
    assert shape.step_bytes() == pytest.approx(15.0e9, rel=0.01)
    assert shape.kv_bytes == 131_072
    alone = Roofs(bandwidth=3e12, products=7e14).step(shape, [(1, 1024)], 1)
    assert alone == pytest.approx((shape.step_bytes() + 1024 * shape.kv_bytes) / 3e12)
    prompt = Roofs(bandwidth=3e12, products=7e14).step(shape, [(8192, 8192)], 1)
    assert prompt > 2 * 8192 * shape.layer_weights / 7e14
    pairs = sum(range(5, 9))
    assert attention_operations(shape, 4, 8) == 4 * 32 * 32 * 128 * pairs


def test_a_mixture_of_experts_reads_only_the_chosen_experts() -> None:
    shape = SHAPES["moe"]
    expert = 3 * 2048 * 768 * 2  # bytes
    alone, crowd = shape.step_bytes(1), shape.step_bytes(10_000)
    assert crowd - alone == pytest.approx(8 * (128 - 8) * expert)
    assert alone < shape.step_bytes(2) < alone + 8 * 8 * expert
    assert shape.layer_weights * 2 == alone - 2 * shape.vocab * shape.hidden


def test_the_minimum_time_of_a_workload() -> None:
    shape = SHAPES["tiny"]
    one = predicted_seconds(shape, ROOFS, [Job([1] * 6, 3)], 4, 64)
    runs = [[(6, 6)], [(1, 7)], [(1, 8)]]
    assert one == pytest.approx(sum(ROOFS.step(shape, run, 1) for run in runs))
    cut = predicted_seconds(shape, ROOFS, [Job([1] * 6, 1)], 4, 4)
    assert cut == pytest.approx(ROOFS.step(shape, [(4, 4)], 0) + ROOFS.step(shape, [(2, 6)], 1))
    jobs = conversations(40, 512, 64)
    together = predicted_seconds(shape, ROOFS, jobs, 8, 128)
    assert together < predicted_seconds(shape, ROOFS, jobs, 2, 128)


def test_goals_leave_a_share_of_the_time_for_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_predicted, "launches", lambda *_: 300)
    shape, roofs = SHAPES["8b"], gpu_predicted.DEVICES["H100"]
    ideal = gpu_predicted.Estimate(
        roofs.bandwidth, roofs.products, launch=0.0, reading=1.0, multiplying=1.0, attending=1.0,
        moving=1.0,
    )  # fmt: skip
    slower = replace(ideal, launch=2e-6)
    decode = [(1, 1024)]
    assert ideal.step(shape, decode, 1) == pytest.approx(roofs.step(shape, decode, 1))
    assert slower.step(shape, decode, 1) == pytest.approx(roofs.step(shape, decode, 1) + 6e-4)
    # For many rows, activations and attention add to the time of the products.
    prompt = [(4096, 4096)]
    assert ideal.step(shape, prompt, 1) > roofs.step(shape, prompt, 1)
    first, *_ = gpu_predicted.decodes("H100", "8b", roofs, slower)
    assert first.needed == pytest.approx(first.floor / (first.floor / 0.85 - 6e-4))
    assert str(first).startswith(
        "| H100 | 8b | decode, batch 1, context 1024 | 5.05 ms | 5.65 ms |"
    )


def test_kinds_of_kernels_are_compared_with_their_minimum_time() -> None:
    names = ("decode_kernel", "nvjet_tst_64x8", "small_batch_kernel", "rms_norm_kernel", "argmax")
    events = [(10.0 * place, 10.0 * place + 8.0, name) for place, name in enumerate(names)]
    found = gpu_engine.by_kind(events, 2)
    assert found == {
        "attention": 4.0, "products": 8.0, "sampling": 4.0, gpu_engine.OTHER: 4.0, "nothing": 4.0,
    }  # fmt: skip
    lines = gpu_engine.timeline(events, 1)
    assert lines[-1].split() == ["40.0", "8.0", "2.0", "argmax"]
    floors = Roofs(bandwidth=3e12, products=7e14).decode(SHAPES["8b"], 1, 1024)
    assert floors["products"] == pytest.approx(5000, rel=0.01)
    assert floors["attention"] == pytest.approx(1024 * 131_072 / 3e6)


def test_chosen_kernels_are_reported_with_their_share_of_the_peak(tmp_path: Path) -> None:
    tuned = tmp_path / "tuned"
    tuned.mkdir()
    kernel = {
        "chosen": "64x128", "microseconds": {"cuBLAS": 20.0, "64x128": 12.5},
        "refused": {"128x64": "no time was left"}, "read_bytes": 10_000,
    }  # fmt: skip
    (tuned / "H100.json").write_text(json.dumps({"versions": {}, "kernels": {"product": kernel}}))
    task = gpu_task.Task("tiny", gpu_sizes.TINY, tmp_path, tmp_path, ROOFS, {})
    lines: list[dict[str, Any]] = []
    gpu_steps.report_choices(
        task, lambda what, **values: lines.append({**WHERE, "what": what, **values})
    )
    (line,) = lines
    assert line["share"] == pytest.approx(10_000 / 1e9 / 12.5e-6)
    assert gpu_table.row(line).endswith("80.0 % of the roof  64x128; cuBLAS: 20.00")


def test_device_tests_report_each_test_that_did_not_pass(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_right(): pass\n"
        "def test_wrong(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='no device')\n"
        "def test_absent(): pass\n"
    )
    program = (
        "import json, sys; from pathlib import Path; from gpu_benchmark import tests as gpu_tests\n"
        "gpu_tests.TESTS = gpu_tests.ROOT = Path(sys.argv[1])\n"
        "def report(what, **values):\n"
        "    print('RESULT', json.dumps([what, values]), file=sys.stderr)\n"
        "for _ in range(2):\n"
        "    gpu_tests.run_tests('x', ('test_it.py', 'test_gone.py'), Path(sys.argv[1]), report)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=gpu.environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = [line[7:] for line in done.stderr.splitlines() if line.startswith("RESULT ")]
    *first, again = map(json.loads, lines)
    # all parts had been started
    assert again == ["tests", {"passed": 0, "failed": 0, "skipped": 0}]
    found = dict(first)
    assert found["failed: test_it.py::test_wrong"]["reason"].startswith("assert 1 == 2")
    assert found["skipped: test_it.py::test_absent"]["reason"] == "Skipped: no device"
    assert found["tests"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert {"test_triton_gpu.py", "test_fp8_gpu.py"} <= set(gpu_tests.marked())


def test_device_times_are_read_from_a_trace() -> None:
    def event(name: str, begin: float, length: float, kind: str = "kernel") -> dict[str, Any]:
        return {"name": name, "ts": begin, "dur": length, "cat": kind}

    trace = {
        "traceEvents": [
            event("gemm", 10, 5), event("norm", 16, 2), event("gemm", 30, 4),
            event("hidden", 12, 1), event("cpu", 0, 99, "cpu_op"), {"name": "mark", "ts": 3},
        ]
    }  # fmt: skip
    events = gpu_engine.device_events(trace, on_gpu=True)
    assert gpu_engine.idle_gaps(events) == [12.0, 1.0]
    assert gpu_engine.heaviest(events)[0] == {"kernel": "gemm", "us": 9.0, "calls": 2}
