"""Compares `headrace bench` with GuideLLM: the same server, the same load, at the same time.

    python benchmarks/agreement.py --url http://127.0.0.1:8000 --guidellm VENV/bin/guidellm

Both clients send chats of the same lengths at the same constant rate and at the same time, so that
noise of the machine affects both. Only requests that were sent while both ran are compared.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from rich.console import Console
from rich.table import Table

from headrace_cli.bench.workload import WORDS

_ENDLESS = "3600"


@dataclass(frozen=True, slots=True)
class Sent:
    """A completed request: when it was sent, in Unix seconds, and its latencies."""

    at: float
    output_tokens: int
    ttft: float
    tpot: float
    e2e: float


def write_dataset(path: Path, options: argparse.Namespace, seed: int) -> None:
    """Writes prompts of `words` words, with the output lengths under both clients' names."""
    rng = random.Random(seed)
    outputs = {name: options.output_tokens for name in ("output_tokens", "output_tokens_count")}
    rows = [
        {"prompt": " ".join(rng.choices(WORDS, k=options.words)), **outputs}
        for _ in range(options.requests)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def headrace_command(options: argparse.Namespace, dataset: Path, report: Path) -> Sequence[str]:
    command = [sys.executable, "-m", "headrace_cli", "bench", "--url", options.url, "--chat"]
    command += ["--model", options.model, "--dataset", str(dataset), "--out", str(report)]
    command += ["--rate", str(options.rate), "--arrivals", "constant"]
    return [*command, "--duration", _ENDLESS, "--warmup", "0"]


def guidellm_command(options: argparse.Namespace, dataset: Path, report: Path) -> Sequence[str]:
    backend = f"kind=openai_http,target={options.url},model={options.model}"
    command = [str(options.guidellm), "run", "--disable-console"]
    command += ["--backend", f"{backend},request_format=/v1/chat/completions"]
    command += ["--profile", f"kind=constant,rate={options.rate}"]
    command += ["--constraint", f"kind=max_requests,count={options.requests}"]
    command += ["--data", f"kind=json_file,path={dataset}"]
    return [*command, "--output", f"kind=json,path={report}"]


def run_both(options: argparse.Namespace, folder: Path, seed: int) -> tuple[list[Sent], list[Sent]]:
    """Runs both clients and returns their requests; ours runs from before GuideLLM's start to after
    its end."""
    names = ("headrace", "guidellm")
    datasets = [folder / f"{name}.jsonl" for name in names]
    reports = [folder / f"{name}.json" for name in names]
    for number, dataset in enumerate(datasets):
        write_dataset(dataset, options, 2 * seed + number)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    ours = subprocess.Popen(
        headrace_command(options, datasets[0], reports[0]), stdout=subprocess.DEVNULL
    )
    try:
        subprocess.run(
            guidellm_command(options, datasets[1], reports[1]), check=True, env=environment
        )
    finally:
        ours.send_signal(signal.SIGINT)
        ours.wait()
    return read_headrace(reports[0]), read_guidellm(reports[1])


def read_headrace(path: Path) -> list[Sent]:
    found = json.loads(path.read_text())
    return [
        Sent(
            found["started"] + each["sent"],
            each["output_tokens"],
            each["ttft_s"],
            each["tpot_s"],
            each["e2e_s"],
        )
        for each in found["timelines"]
        if each["error"] is None
    ]


def read_guidellm(path: Path) -> list[Sent]:
    """Reads GuideLLM's report; its `inter_token_latency` is the mean time per token after the first
    one."""
    (run,) = json.loads(path.read_text())["benchmarks"]
    return [
        Sent(
            each["request_start_time"],
            each["output_tokens"],
            each["time_to_first_token_ms"] / 1e3,
            each["inter_token_latency_ms"] / 1e3,
            each["request_latency"],
        )
        for each in run["requests"]["successful"]
    ]


def common(ours: list[Sent], theirs: list[Sent]) -> tuple[list[Sent], list[Sent], float]:
    """The requests that were sent while both clients ran, and the length of that time in
    seconds."""
    begin = max(min(each.at for each in sent) for sent in (ours, theirs))
    end = min(max(each.at for each in sent) for sent in (ours, theirs))
    chosen = [[each for each in sent if begin <= each.at < end] for sent in (ours, theirs)]
    return chosen[0], chosen[1], end - begin


def figures(sent: list[Sent], seconds: float) -> dict[str, float]:
    tokens = sum(each.output_tokens for each in sent)
    found = {"requests/s": len(sent) / seconds, "output tokens/s": tokens / seconds}
    for name, values in (
        ("first token", [each.ttft for each in sent]),
        ("per token", [each.tpot for each in sent]),
        ("end to end", [each.e2e for each in sent]),
    ):
        found[f"{name}, mean, ms"] = 1e3 * fmean(values)
        found[f"{name}, p50, ms"] = 1e3 * median(values)
    return found


def show(rounds: Sequence[tuple[dict[str, float], dict[str, float]]]) -> None:
    """Prints means over the rounds, and the lowest and highest difference of a round."""
    table = Table("", "headrace bench", "GuideLLM", "difference", "of the rounds")
    for name in rounds[0][0]:
        ours, theirs = (fmean(each[client][name] for each in rounds) for client in (0, 1))
        each_round = [first[name] / second[name] - 1 for first, second in rounds]
        spread = f"{min(each_round):+.1%} to {max(each_round):+.1%}"
        table.add_row(name, f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs - 1:+.1%}", spread)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", required=True, help="a running server, without /v1")
    parser.add_argument("--model", default="headrace-demo")
    parser.add_argument("--guidellm", type=Path, required=True, help="GuideLLM's program")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second of each client")
    parser.add_argument("--requests", type=int, default=120, help="of GuideLLM in a round")
    parser.add_argument("--words", type=int, default=40, help="of a prompt")
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--json", type=Path, help="write all rounds")
    options = parser.parse_args()
    rounds: list[tuple[dict[str, float], dict[str, float]]] = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs, seconds = common(*run_both(options, Path(folder), number))
        rounds.append((figures(ours, seconds), figures(theirs, seconds)))
        print(f"round {number + 1}/{options.rounds}: {len(ours)}, {len(theirs)} requests")
    show(rounds)
    if options.json:
        options.json.write_text(json.dumps(rounds, indent=2) + "\n")


if __name__ == "__main__":
    main()
