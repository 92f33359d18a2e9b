"""One run of `headrace bench`: probe the server, warm it up, load it, report."""

import asyncio
import json
import random
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path

import uvloop
from rich.console import Console

from ..errors import CliError, UsageError
from ..extras import need
from ..tables import Output, check_folder, without_controls
from .arrivals import Arrivals, arrival_times, read_trace
from .client import Client, RefusedError, Server
from .load import Load, Target, find_model, find_target, measure_words, run_load
from .plot import write_plot
from .progress import LoadProgress
from .report import Measured, Report, Slo, record, report, show
from .workload import (
    Job,
    Lengths,
    Prefixes,
    Sizes,
    TokenIds,
    dataset_jobs,
    drawn_sizes,
    synthetic_jobs,
)

_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The prompts and lengths of requests.

    With `dataset`, only `outputs` and `chat` are used besides.
    """

    dataset: Path | None = None
    prompts: Lengths
    outputs: Lengths
    prefixes: Prefixes | None = None
    chat: bool | None = None
    vocab_size: int = 1000
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When requests are sent: at a rate, by a trace, or as fast as `concurrency` allows."""

    rate: float | None = None
    arrivals: Arrivals = Arrivals.POISSON
    burst: int = 16
    trace: Path | None = None
    concurrency: int | None = None
    requests: int | None = None
    duration: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """The options of a run; times are in seconds. `fields` are added to every body."""

    url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    prompts: Prompts
    pace: Pace
    warmup: int = 0
    stream: bool = True
    timeout: float = 600.0
    slo: Slo | None = None
    fields: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The files to which results are written."""

    report: Path | None = None
    picture: Path | None = None

    def check(self) -> None:
        """Raises UsageError if a file could not be written after the run, which can take long."""
        if self.picture is not None:
            need("simulate", "matplotlib")
        for path in (self.report, self.picture):
            if path is not None:
                check_folder(path)

    def write(self, document: dict[str, object], result: Report, measured: Measured) -> None:
        """Raises UsageError if a file cannot be written."""
        if self.report is not None:
            timelines = [record(timeline, measured) for timeline in measured.timelines]
            _write(self.report, json.dumps({**document, "timelines": timelines}, indent=2) + "\n")
        if self.picture is not None:
            write_plot(self.picture, result, measured)


def run_bench(config: BenchConfig, output: Output, files: Files) -> int:
    """Runs the load, shows its report and returns the exit code. Raises CliError."""
    files.check()
    try:
        run = Run(config, output.notes)
        result, measured = uvloop.run(run.measure())
    except RefusedError as error:
        raise CliError(_refused(config, error)) from error
    except OSError as error:
        reason = error.strerror or error or type(error).__name__
        raise CliError(
            f"cannot load {config.url}: {reason}. --url names the server; is it running?"
        ) from error
    except ValueError as error:
        raise UsageError(str(error)) from error
    document: dict[str, object] = {"url": config.url, **asdict(result)}
    if output.as_json:
        output.json(document)
    else:
        show(result, output.out)
    files.write(document, result, measured)
    if run.interrupted:
        return _INTERRUPTED
    return 1 if result.errors or not result.completed else 0


def _refused(config: BenchConfig, error: RefusedError) -> str:
    if error.status not in (401, 403):
        return f"cannot load {config.url}: {error}"
    return f"{config.url} wants an API key (http {error.status}): give it with --api-key"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {path} ({error.strerror})", "choose another file with --out"
        ) from error


class Run:
    """One measurement. `notes` is where progress is shown."""

    def __init__(self, config: BenchConfig, notes: Console) -> None:
        self._config = config
        self._notes = notes
        self._stop = asyncio.Event()
        self._server = Server.parse(
            config.url, {"Authorization": f"Bearer {config.api_key}"} if config.api_key else None
        )
        prompts = config.prompts
        self._trace = None if config.pace.trace is None else read_trace(config.pace.trace)
        self._load = self._as_load()
        self._dataset = None
        if prompts.dataset is not None:
            self._dataset = dataset_jobs(
                prompts.dataset, prompts.outputs, chat=prompts.chat, seed=prompts.seed
            )

    @property
    def interrupted(self) -> bool:
        return self._stop.is_set()

    async def measure(self) -> tuple[Report, Measured]:
        """Probes the server, warms it up, then measures until the end or Ctrl-C.

        Raises OSError if the server does not answer, ValueError for what it does not support.
        """
        load = self._load
        client = Client(self._server, timeout=self._config.timeout)
        try:
            model = self._config.model or await find_model(client)
            jobs = await self._jobs(client, model)
            first, *spare = islice(jobs, load.warmup + 1)
            target = await find_target(client, model, first, load)
            taken = ", ".join(target.features) or "those of OpenAI"
            note = without_controls(f"fields of a request that {model} accepts: {taken}")
            self._notes.print(note, markup=False, highlight=False)
            for job in spare:
                await target.send(job, load.common_fields)
            measured = await self._measured(target, jobs)
        finally:
            await client.close()
        exact = "ignore_eos" in target.features
        return report(model, measured, exact=exact, slo=self._config.slo), measured

    async def _measured(self, target: Target, jobs: Iterator[Job]) -> Measured:
        load, fields = self._load, self._load.common_fields
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._stop.set)
        try:
            with LoadProgress(self._notes, load.requests) as progress:
                return await run_load(
                    lambda job: target.send(job, fields), jobs, load, progress, self._stop
                )
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    def _as_load(self) -> Load:
        config, pace = self._config, self._config.pace
        times, requests = None, pace.requests
        if pace.rate is not None:
            rng = random.Random(f"{config.prompts.seed} arrivals")
            times = arrival_times(pace.arrivals, rng, pace.rate, burst=pace.burst)
        if self._trace is not None:
            times = iter([request.at for request in self._trace])
            requests = min(len(self._trace), requests or len(self._trace))
        return Load(
            times=times,
            concurrency=pace.concurrency,
            requests=requests,
            duration=pace.duration,
            warmup=config.warmup,
            stream=config.stream,
            fields=config.fields,
        )

    async def _jobs(self, client: Client, model: str) -> Iterator[Job]:
        """The requests to send; the first ones are for the probe and the warm-up."""
        if self._dataset is not None:
            return self._dataset
        prompts = self._config.prompts
        if prompts.chat:
            words = await measure_words(client, model)
            return synthetic_jobs(words, self._sizes(), prompts.prefixes, seed=prompts.seed)
        ids = TokenIds(prompts.vocab_size)
        return synthetic_jobs(ids, self._sizes(), prompts.prefixes, seed=prompts.seed)

    def _sizes(self) -> Iterator[Sizes]:
        prompts = self._config.prompts
        if self._trace is None:
            return drawn_sizes(prompts.prompts, prompts.outputs, seed=prompts.seed)
        sizes = [request.sizes for request in self._trace]
        return chain([sizes[0]] * (self._load.warmup + 1), sizes)
