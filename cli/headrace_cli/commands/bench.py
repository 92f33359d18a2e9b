"""The arguments of `headrace bench`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from ..bench.arrivals import Arrivals
from ..bench.workload import MAX_REQUESTS
from ..errors import UsageError
from ..extras import need
from ..running import DATA_DIR, api_url
from ..tables import Output
from .running_options import ApiKey, ApiUrl, DataFolder, ModelName

app = typer.Typer(rich_markup_mode="markdown")
Value = TypeVar("Value")
_LENGTHS = "N, LOW-HIGH, or MEAN,DEVIATION"
_CONCURRENCY = 16
_REQUESTS = 64


@app.command(epilog="Example: headrace bench --concurrency 32 --requests 256 --chat")
def bench(
    url: ApiUrl = None,
    data_dir: DataFolder = DATA_DIR,
    model: ModelName = None,
    api_key: ApiKey = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most requests in flight; default: 16, or no limit with --rate or --trace."
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second; default: as --concurrency allows.")
    ] = None,
    arrivals: Annotated[
        Arrivals, typer.Option(help="How the requests of --rate follow each other.")
    ] = Arrivals.POISSON,
    burst_size: Annotated[
        int, typer.Option(min=1, help="Requests in each burst of --arrivals burst.")
    ] = 16,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="CSV or JSONL with arrival_seconds, prompt_tokens, output_tokens, or a trace of "
            "Mooncake, Azure or BurstGPT; instead of a rate and lengths."
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_REQUESTS,
            help="Number of requests; default: 64, or no limit with --duration.",
        ),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(min=0.1, help="Stop sending after this number of seconds.")
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(
            help="JSONL or JSON file of prompts: `prompt`, `messages`, or `conversations` as in "
            "ShareGPT."
        ),
    ] = None,
    prompt_tokens: Annotated[
        str | None, typer.Option(help=f"Length of random prompts: {_LENGTHS}; default: 16-512.")
    ] = None,
    output_tokens: Annotated[str, typer.Option(help=f"Length of answers: {_LENGTHS}.")] = "16-128",
    prefixes: Annotated[
        int, typer.Option(min=0, help="Number of shared prefixes of random prompts.")
    ] = 0,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="Length of each shared prefix.")] = 256,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--completions",
            help="API to use; default: as the data set, else completions of random token ids.",
        ),
    ] = None,
    vocab_size: Annotated[
        int, typer.Option(min=16, help="Random token ids are below this number.")
    ] = 1000,
    stream: Annotated[bool, typer.Option(help="Ask for streams of server-sent events.")] = True,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")
    ] = 0.0,
    extra_body: Annotated[
        str, typer.Option(help="JSON object of fields to add to every request.")
    ] = "{}",
    seed: Annotated[int, typer.Option(help="Seed of prompts, lengths and arrivals.")] = 0,
    warmup: Annotated[
        int, typer.Option(min=0, help="Requests that are sent first and not measured.")
    ] = 2,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that one request may take.")
    ] = 600.0,
    slo: Annotated[
        str | None, typer.Option(help="Objectives for goodput, as ttft:500ms,tpot:50ms,e2e:10s.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the report as JSON, with the times of each request."),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="File for the report as a picture.")] = None,
) -> None:
    """Measure an OpenAI server under load: latencies, throughput, goodput.

    Failed requests are not retried. Exit code 1: requests failed; 2: wrong usage; 130: ended by
    Ctrl-C.
    """
    need("up", "httptools")
    from ..bench.bench import BenchConfig, Files, Pace, Prompts, run_bench
    from ..bench.report import Slo
    from ..bench.workload import Prefixes, parse_lengths

    if rate is not None and not 0 < rate < float("inf"):
        raise UsageError(f"--rate {rate:g} is out of range", "give requests a second, over 0")
    _exclusive(trace, "--trace", rate=rate, dataset=dataset, prompt_tokens=prompt_tokens)
    _exclusive(dataset, "--dataset", prompt_tokens=prompt_tokens, prefixes=prefixes or None)
    open_loop = rate is not None or trace is not None
    pace = Pace(
        rate=rate,
        arrivals=arrivals,
        burst=burst_size,
        trace=trace,
        concurrency=concurrency or (None if open_loop else _CONCURRENCY),
        requests=requests or (None if duration or trace else _REQUESTS),
        duration=duration,
    )
    prompts = Prompts(
        dataset=dataset,
        prompts=_parsed("--prompt-tokens", parse_lengths, prompt_tokens or "16-512"),
        outputs=_parsed("--output-tokens", parse_lengths, output_tokens),
        prefixes=Prefixes(prefixes, prefix_tokens) if prefixes else None,
        chat=chat,
        vocab_size=vocab_size,
        seed=seed,
    )
    fields = {"temperature": temperature, "seed": seed}
    config = BenchConfig(
        url=api_url(url, data_dir),
        model=model,
        api_key=api_key,
        prompts=prompts,
        pace=pace,
        warmup=warmup,
        stream=stream,
        timeout=timeout,
        slo=None if slo is None else _parsed("--slo", Slo.parse, slo),
        fields={**fields, **_parsed("--extra-body", _json_object, extra_body)},
    )
    raise typer.Exit(run_bench(config, Output(as_json), Files(report=out, picture=png)))


def _exclusive(given: object, option: str, **others: object) -> None:
    """Raises UsageError for options that contradict `option`, which is given."""
    for name, value in others.items():
        if given is not None and value is not None:
            other = "--" + name.replace("_", "-")
            raise UsageError(f"{option} and {other} exclude each other", "leave one of them out")


def _parsed(option: str, parse: Callable[[str], Value], text: str) -> Value:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option} {error}") from error


def _json_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, not {text!r}")
    return value
