"""The commands that watch and load a running system, against a real one."""

import json
import subprocess

from headrace_testing.headrace_up import HEADRACE, MODEL, UpProcess
from headrace_testing.in_process import headrace
from headrace_testing.processes import until


def test_top_shows_what_engines_do_while_bench_loads_them(served: UpProcess) -> None:
    load = subprocess.Popen(
        [str(HEADRACE), "bench", "--url", served.url, "--json", "--concurrency", "8",
         "--duration", "60", "--output-tokens", "256"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        until(lambda: _sequences(served) >= 8, "sequences of the load")
        shown = headrace("top", "--url", served.url, "--once")
    finally:
        load.send_signal(2)
        out, _ = load.communicate(timeout=120)

    row = next(line for line in shown.stdout.splitlines() if line.startswith("engine-0 "))
    assert "ready" in row and " ms " in row
    report = json.loads(out)
    assert (load.returncode, report["model"]) == (130, MODEL)
    assert set(report["errors"]) <= {"unfinished"}


def _sequences(served: UpProcess) -> int:
    done = headrace("top", "--url", served.url, "--once", "--json")
    assert done.returncode == 0, done.stderr
    return sum(len(engine["sequences"]) for engine in json.loads(done.stdout)["engines"])


def test_bench_measures_chats_with_shared_beginnings(served: UpProcess) -> None:
    done = headrace(
        *("bench", "--url", served.url, "--chat", "--requests", "8", "--prompt-tokens", "200"),
        *("--output-tokens", "12", "--prefixes", "2", "--prefix-tokens", "100", "--json"),
        *("--slo", "e2e:300s"),
    )

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["completed"], report["output_tokens"], report["short_outputs"]) == (8, 96, 0)
    assert 0.8 < report["prompt_tokens"] / (8 * 300) < 1.2
    assert report["goodput"]["share"] == 1.0
