"""The benchmark of a GPU, every part of it on the CPU with a tiny model, so that it does not fail
where a device is lent for minutes; its cost model; and what a part that fails or hangs leaves.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu
import gpu_engine
import gpu_parts
from gpu_shapes import SHAPES, Job, Roofs, attention_operations, conversations, predicted_seconds

ROOFS = Roofs(bandwidth=1e9, products=1e12)


def reports(out: Path) -> dict[str, dict[str, Any]]:
    return {one["what"]: one for one in gpu.results(out)}


def test_every_part_runs_and_reports_its_figures(tmp_path: Path) -> None:
    before, gradients = torch.get_num_threads(), torch.is_grad_enabled()
    try:
        for part in gpu_parts.PARTS:
            gpu_parts.measure_part(part, "tiny", tmp_path, gpu_parts.TINY, {})
    finally:
        torch.set_num_threads(before)
        torch.set_grad_enabled(gradients)
    found = reports(tmp_path)
    for batch, context, _ in gpu_parts.TINY.decodes:
        assert found[f"decode, batch {batch}, context {context}"]["share"] > 0
        gap = found[f"gap between decode steps, batch {batch}"]
        assert gap["value"] >= 0 and gap["top_kernels"][0]["us"] > 0
        assert "us a step" in gpu.kernels(gap)[0]
        assert (tmp_path / f"trace-tiny-decode-{batch}.json").exists()
    for prompts, length in gpu_parts.TINY.prefills:
        assert found[f"prefill, {prompts} of {length}"]["share"] > 0
    assert found[f"{gpu_parts.TINY.requests} conversations at once"]["value"] > 0
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
    assert shape.step_bytes == pytest.approx(15.0e9, rel=0.01)
    assert shape.kv_bytes == 131_072
    alone = Roofs(bandwidth=3e12, products=7e14).step(shape, [(1, 1024)], 1)
    assert alone == pytest.approx((shape.step_bytes + 1024 * shape.kv_bytes) / 3e12)
    prompt = Roofs(bandwidth=3e12, products=7e14).step(shape, [(8192, 8192)], 1)
    assert prompt > 2 * 8192 * shape.layer_weights / 7e14
    pairs = sum(range(5, 9))
    assert attention_operations(shape, 4, 8) == 4 * 32 * 32 * 128 * pairs


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
