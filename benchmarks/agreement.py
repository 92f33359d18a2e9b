"""Whether `headrace bench` measures what GuideLLM measures: the same server and load, in turns.

    python benchmarks/agreement.py --url http://127.0.0.1:8000 --guidellm VENV/bin/guidellm

Both send chats of the same lengths at the same constant rate. Prompts differ in each run, so that
no cache of the server helps the one that comes second. Figures are medians of the rounds.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace_cli.bench.workload import WORDS

Figures = Mapping[str, float]


def write_dataset(path: Path, options: argparse.Namespace, seed: int) -> None:
    """Writes prompts of `words` words, with the output lengths under both clients' names."""
    rng = random.Random(seed)
    outputs = {name: options.output_tokens for name in ("output_tokens", "output_tokens_count")}
    rows = [
        {"prompt": " ".join(rng.choices(WORDS, k=options.words)), **outputs}
        for _ in range(options.requests + 8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_headrace(options: argparse.Namespace, dataset: Path) -> Figures:
    command = [sys.executable, "-m", "headrace_cli", "bench", "--url", options.url, "--chat"]
    command += ["--model", options.model, "--dataset", str(dataset), "--json"]
    command += ["--rate", str(options.rate), "--arrivals", "constant"]
    command += ["--requests", str(options.requests), "--warmup", "0"]
    found = json.loads(_run(command))
    assert found["completed"] == options.requests, found["errors"]
    return {
        "requests/s": found["requests_per_s"],
        "output tokens/s": found["output_tokens_per_s"],
        "end to end, mean, ms": 1e3 * found["e2e_s"]["mean"],
        "end to end, p50, ms": 1e3 * found["e2e_s"]["p50"],
        "first token, mean, ms": 1e3 * found["ttft_s"]["mean"],
        "first token, p50, ms": 1e3 * found["ttft_s"]["p50"],
        "per token, mean, ms": 1e3 * found["tpot_s"]["mean"],
    }


def run_guidellm(options: argparse.Namespace, dataset: Path) -> Figures:
    report = dataset.with_name("guidellm.json")
    backend = f"kind=openai_http,target={options.url},model={options.model}"
    command = [str(options.guidellm), "run", "--disable-console"]
    command += ["--backend", f"{backend},request_format=/v1/chat/completions"]
    command += ["--profile", f"kind=constant,rate={options.rate}"]
    command += ["--constraint", f"kind=max_requests,count={options.requests}"]
    command += ["--data", f"kind=json_file,path={dataset}"]
    command += ["--output", f"kind=json,path={report}"]
    _run(command)
    run = json.loads(report.read_text())["benchmarks"][0]
    found: dict[str, Any] = {name: each.get("successful") for name, each in _parts(run)}
    completed = run["metrics"]["request_totals"]["successful"]
    assert completed == options.requests, run["metrics"]["request_totals"]
    return {
        # Of the whole run, as ours: its own rates leave out the time before the first end.
        "requests/s": completed / run["duration"],
        "output tokens/s": found["output_token_count"]["total_sum"] / run["duration"],
        "end to end, mean, ms": 1e3 * found["request_latency"]["mean"],
        "end to end, p50, ms": 1e3 * found["request_latency"]["median"],
        "first token, mean, ms": found["time_to_first_token_ms"]["mean"],
        "first token, p50, ms": found["time_to_first_token_ms"]["median"],
        # GuideLLM's name for the mean time per token after the first one.
        "per token, mean, ms": found["inter_token_latency_ms"]["mean"],
    }


def _parts(run: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, each) for name, each in run["metrics"].items() if isinstance(each, dict)]


def _run(command: Sequence[str]) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def show(rounds: Sequence[tuple[Figures, Figures]]) -> None:
    table = Table("", "headrace bench", "GuideLLM", "difference")
    for name in rounds[0][0]:
        ours, theirs = (median(each[client][name] for each in rounds) for client in (0, 1))
        table.add_row(name, f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs - 1:+.1%}")
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url", required=True, help="a running server, without /v1")
    parser.add_argument("--model", default="headrace-demo")
    parser.add_argument("--guidellm", type=Path, required=True, help="its program")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=80, help="in each run")
    parser.add_argument("--words", type=int, default=40, help="of a prompt")
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--json", type=Path, help="write all rounds")
    options = parser.parse_args()
    rounds: list[tuple[Figures, Figures]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            pair: list[Figures] = []
            for turn, run in enumerate((run_headrace, run_guidellm)):
                dataset = Path(folder) / f"{number}-{turn}.jsonl"
                write_dataset(dataset, options, seed=2 * number + turn)
                pair.append(run(options, dataset))
            rounds.append((pair[0], pair[1]))
            print(f"round {number + 1}/{options.rounds}: {rounds[-1]}", file=sys.stderr)
    show(rounds)
    if options.json:
        options.json.write_text(json.dumps(rounds, indent=2) + "\n")


if __name__ == "__main__":
    main()
