"""The benchmark of a GPU, every part of it on the CPU with a tiny model, so that it does not fail
where a device is lent for minutes; its cost model; and what a part that fails or hangs leaves.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu
import gpu_engine
import gpu_parts
import gpu_sizes
import gpu_tests
from gpu_shapes import SHAPES, Job, Roofs, attention_operations, conversations, predicted_seconds

ROOFS = Roofs(bandwidth=1e9, products=1e12)


def reports(out: Path) -> dict[str, dict[str, Any]]:
    return {one["what"]: one for one in gpu.results(out)}


def test_every_part_runs_and_reports_its_figures(tmp_path: Path) -> None:
    before, gradients = torch.get_num_threads(), torch.is_grad_enabled()
    try:
        for part in gpu_parts.PARTS:
            if part in ("tests", "compiled"):  # they run pytest
                continue
            gpu_parts.measure_part(part, "tiny", tmp_path, gpu_sizes.TINY, {})
    finally:
        torch.set_num_threads(before)
        torch.set_grad_enabled(gradients)
    found = reports(tmp_path)
    for batch, context, _ in gpu_sizes.TINY.decodes:
        assert found[f"decode, batch {batch}, context {context}"]["share"] > 0
        gap = found[f"gap between decode steps, batch {batch}"]
        assert gap["value"] >= 0 and gap["top_kernels"][0]["us"] > 0
        assert "us a step" in gpu.kernels(gap)[0]
        step = f"decode step, batch {batch}, context {context}"
        assert found[step]["launches"] > 0 and found[f"{step}: {gpu_engine.OTHER}"]["value"] > 0
        lines = (tmp_path / f"profile-tiny-decode-{batch}.txt").read_text().splitlines()
        assert "kernel" in lines[0] and len(lines) > 10
        assert (tmp_path / f"trace-tiny-decode-{batch}.json").exists()
    for prompts, length in gpu_sizes.TINY.prefills:
        assert found[f"prefill, {prompts} of {length}"]["share"] > 0
    assert found[f"{gpu_sizes.TINY.requests} conversations at once"]["value"] > 0
    assert found["transformers, static batches"]["value"] > 0
    assert found["transformers, generate_batch"]["value"] > 0
    for what in ("asynchronous", "graphs"):
        assert found[f"equal tokens with and without {what}"]["value"] == 4
        assert found[f"deterministic, equal tokens with and without {what}"]["value"] == 4
    assert found["attention, Llama 8B, bfloat16"]["value"] <= 2e-2
    assert found["deterministic, equal alone and in a crowd"]["value"] == 4
    assert all(gpu.row(one).startswith("tiny") for one in found.values())
    assert len(gpu.compare(gpu.results(tmp_path))) == 2


def test_a_part_that_fails_is_tried_again_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[tuple[str, bool]] = []

    def run(plan: gpu.Plan, out: Path, tiny: bool, left: float, safe: bool = False) -> str | None:
        assert left <= 100.0
        tried.append((plan.part, safe))
        line = {"part": plan.part, "model": plan.model, "what": f"{plan.part} done", "value": 1.0}
        with (out / "results.jsonl").open("a") as file:
            file.write(json.dumps({**line, "unit": "x"}) + "\n")
        if plan.part == "steps" and not safe:
            return f"{gpu.FAILED} 1: no such kernel"
        return "cut short after 9 s" if plan.part == "peers" else None

    monkeypatch.setattr(gpu, "run", run)
    assert gpu.measure(tmp_path, True, 100.0) == 2
    assert tried[:3] == [("roofs", False), ("steps", False), ("steps", True)]
    assert ("serving", False) in tried and ("equality", False) in tried
    problems = json.loads((tmp_path / "report.json").read_text())["problems"]
    assert problems["peers 8b"] == "cut short after 9 s"
    assert "no such kernel; once more: came to its end" in problems["steps 8b"]
    assert "serving done" in capsys.readouterr().out


def test_a_part_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "hang"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    failing = tmp_path / "fail"
    failing.write_text("#!/bin/sh\necho out of memory\nexit 3\n")
    for script in (hanging, failing):
        script.chmod(0o755)
    plan = gpu.Plan("steps", "8b", 5.0)
    monkeypatch.setattr(sys, "executable", str(failing))
    assert gpu.run(plan, tmp_path, False, 60.0) == "ended with 3: out of memory"
    assert gpu.run(plan, tmp_path, False, 2.0) == "no time was left"
    monkeypatch.setattr(sys, "executable", str(hanging))
    monkeypatch.setattr(gpu, "LEAST", 0.0)
    assert gpu.run(plan, tmp_path, False, 0.05) == "cut short after 0 s"


def test_the_least_time_of_a_step() -> None:
    shape = SHAPES["8b"]
    assert shape.step_bytes() == pytest.approx(15.0e9, rel=0.01)
    assert shape.kv_bytes == 131_072
    alone = Roofs(bandwidth=3e12, products=7e14).step(shape, [(1, 1024)], 1)
    assert alone == pytest.approx((shape.step_bytes() + 1024 * shape.kv_bytes) / 3e12)
    prompt = Roofs(bandwidth=3e12, products=7e14).step(shape, [(8192, 8192)], 1)
    assert prompt > 2 * 8192 * shape.layer_weights / 7e14
    pairs = sum(range(5, 9))
    assert attention_operations(shape, 4, 8) == 4 * 32 * 32 * 128 * pairs


def test_a_mixture_reads_the_experts_that_are_taken() -> None:
    shape = SHAPES["moe"]
    expert = 3 * 2048 * 768 * 2  # bytes
    alone, crowd = shape.step_bytes(1), shape.step_bytes(10_000)
    assert crowd - alone == pytest.approx(8 * (128 - 8) * expert)
    assert alone < shape.step_bytes(2) < alone + 8 * 8 * expert
    assert shape.layer_weights * 2 == alone - 2 * shape.vocab * shape.hidden


def test_the_least_time_of_a_workload() -> None:
    shape = SHAPES["tiny"]
    one = predicted_seconds(shape, ROOFS, [Job([1] * 6, 3)], 4, 64)
    runs = [[(6, 6)], [(1, 7)], [(1, 8)]]
    assert one == pytest.approx(sum(ROOFS.step(shape, run, 1) for run in runs))
    cut = predicted_seconds(shape, ROOFS, [Job([1] * 6, 1)], 4, 4)
    assert cut == pytest.approx(ROOFS.step(shape, [(4, 4)], 0) + ROOFS.step(shape, [(2, 6)], 1))
    jobs = conversations(40, 512, 64)
    together = predicted_seconds(shape, ROOFS, jobs, 8, 128)
    assert together < predicted_seconds(shape, ROOFS, jobs, 2, 128)


def test_kinds_of_kernels_beside_what_they_take_at_least() -> None:
    names = ("decode_kernel", "nvjet_tst_64x8", "skinny_kernel", "rms_norm_kernel", "argmax")
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


def test_chosen_kernels_are_lines_with_their_share_of_the_roof(tmp_path: Path) -> None:
    tuned = tmp_path / "tuned"
    tuned.mkdir()
    kernel = {
        "chosen": "64x128", "microseconds": {"cuBLAS": 20.0, "64x128": 12.5},
        "refused": {"128x64": "no time was left"}, "read_bytes": 10_000,
    }  # fmt: skip
    (tuned / "H100.json").write_text(json.dumps({"versions": {}, "kernels": {"product": kernel}}))
    task = gpu_parts.Task("tiny", gpu_sizes.TINY, tmp_path, ROOFS, {})
    lines: list[dict[str, Any]] = []
    gpu_parts.report_choices(
        task, lambda what, **values: lines.append({"model": "8b", "what": what, **values})
    )
    (line,) = lines
    assert line["share"] == pytest.approx(10_000 / 1e9 / 12.5e-6)
    assert gpu.row(line).endswith("80.0 % of the roof  64x128; cuBLAS: 20.00")


def test_the_tests_of_a_device_tell_each_that_did_not_pass(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_right(): pass\n"
        "def test_wrong(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='no device')\n"
        "def test_absent(): pass\n"
    )
    program = (
        "import json, sys; from pathlib import Path; import gpu_tests\n"
        "gpu_tests.TESTS = gpu_tests.ROOT = Path(sys.argv[1])\n"
        "def report(what, **values):\n"
        "    print('RESULT', json.dumps([what, values]), file=sys.stderr)\n"
        "gpu_tests.run_tests(('test_it.py', 'test_gone.py'), Path(sys.argv[1]), report)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=gpu.environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = [line[7:] for line in done.stderr.splitlines() if line.startswith("RESULT ")]
    found = dict(json.loads(line) for line in lines)
    assert found["failed: test_it.py::test_wrong"]["reason"].startswith("assert 1 == 2")
    assert found["skipped: test_it.py::test_absent"]["reason"] == "Skipped: no device"
    assert found["tests"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert {"test_triton_gpu.py", "test_fp8_gpu.py"} <= set(gpu_tests.marked())


def test_what_the_device_did_is_read_from_a_trace() -> None:
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
