"""Sends a load to an OpenAI server and measures every request.

Requests have arrival times, or follow as fast as their concurrency allows. Nothing is retried;
what fails is counted by kind.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import Any, Protocol

from .client import Client, RefusedError, Timeline
from .report import Measured
from .workload import Job, Words

UNFINISHED = "unfinished"
# Extensions that other servers than OpenAI's may have, best first: exact lengths, and token ids for
# counting.
FEATURE_SETS: tuple[Mapping[str, object], ...] = (
    {"ignore_eos": True, "return_token_ids": True},
    {"ignore_eos": True},
    {},
)
_PROBE_TOKENS = 2
# The lengths, in words, of two chats from which the tokens of a word follow. The second pair is for
# models with short contexts.
_CHATS = ((64, 512), (8, 32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How requests are sent. Times are in seconds; None means no bound.

    `times` are the arrivals from the start of the run; None sends as fast as `concurrency` allows.
    No request is sent after `duration` or after `requests` of them. `fields` are those of all
    bodies. `warmup` requests are sent before those that are measured.
    """

    times: Iterator[float] | None = None
    concurrency: int | None = None
    requests: int | None = None
    duration: float | None = None
    warmup: int = 0
    stream: bool = True
    fields: Mapping[str, object] = field(default_factory=dict)

    @property
    def common_fields(self) -> Mapping[str, object]:
        """The fields of all request bodies."""
        if not self.stream:
            return self.fields
        return {"stream": True, "stream_options": {"include_usage": True}, **self.fields}


class Watch(Protocol):
    """Follows the progress of a run. `ended` gets the request's timeline."""

    def begun(self) -> None: ...

    def ended(self, timeline: Timeline) -> None: ...


@dataclass(frozen=True, slots=True)
class Target:
    """A server's model, and the fields beyond OpenAI's that it takes."""

    client: Client
    model: str
    features: Mapping[str, object]

    async def send(self, job: Job, fields: Mapping[str, object]) -> Timeline:
        body = job.payload(self.model, {**fields, **self.features})
        return await self.client.generate(job.path, body)


async def find_model(client: Client) -> str:
    """The first model that the server lists. Raises OSError, or ValueError if it lists none."""
    models = (await client.get("/v1/models")).get("data") or []
    if not models:
        raise ValueError("the server lists no model: name one with --model")
    return str(models[0]["id"])


async def find_target(client: Client, model: str, job: Job, load: Load) -> Target:
    """The best of FEATURE_SETS that the server takes. Raises ConnectionError if it takes none."""
    probe = Job(job.prompt, _PROBE_TOKENS)
    for features in FEATURE_SETS:
        target = Target(client, model, features)
        timeline = await target.send(probe, load.common_fields)
        if timeline.error is None:
            return target
        if timeline.error not in ("http 400", "http 422"):
            break
    if timeline.error in ("http 401", "http 403"):
        raise RefusedError(probe.path, int(timeline.error.removeprefix("http ")))
    raise ConnectionError(
        f"the server refused a first request: {timeline.error} {timeline.detail}".rstrip()
    )


async def measure_words(client: Client, model: str) -> Words:
    """Finds how many tokens this server counts for a word.

    If the server does not report counts, one token per word is assumed.
    """
    for short, long in _CHATS:
        few, many = await _counted(client, model, short), await _counted(client, model, long)
        if few is not None and many is not None and few < many:
            per_word = (many - few) / (long - short)
            return Words(per_word, few - short * per_word)
    return Words()


async def _counted(client: Client, model: str, words: int) -> int | None:
    job = Job(Words().prompt(random.Random(words), words, ()), 1)
    return (await client.generate(job.path, job.payload(model, {}))).prompt_tokens


async def run_load(
    send: Callable[[Job], Awaitable[Timeline]],
    jobs: Iterable[Job],
    load: Load,
    watch: Watch,
    stop: asyncio.Event,
) -> Measured:
    """Sends jobs as `load` says and waits for their answers, or until `stop`.

    Requests that are stopped are `unfinished`.
    """
    slots = asyncio.Semaphore(load.concurrency) if load.concurrency else None
    started, cpu = time.perf_counter(), time.process_time()
    timelines: list[Timeline] = []
    lags: list[float] = []
    wanted = 0

    async def one(number: int, job: Job) -> None:
        watch.begun()
        try:
            timelines[number] = await send(job)
        except asyncio.CancelledError:
            timelines[number].ended = time.perf_counter()
            raise
        finally:
            if slots is not None:
                slots.release()
            watch.ended(timelines[number])

    async def all_jobs() -> None:
        nonlocal wanted
        async with asyncio.TaskGroup() as group:
            for number, (due, job) in enumerate(_planned(jobs, load)):
                if load.times is not None:
                    await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
                if slots is not None:
                    await slots.acquire()
                now = time.perf_counter()
                if load.duration is not None and now - started >= load.duration:
                    break
                if load.times is not None:
                    lags.append(max(0.0, now - started - due))
                wanted += job.output_tokens
                timelines.append(Timeline(started=now, ended=now, error=UNFINISHED))
                group.create_task(one(number, job))

    await _until(all_jobs(), stop)
    duration = time.perf_counter() - started
    return Measured(timelines, lags, started, duration, time.process_time() - cpu, wanted)


def _planned(jobs: Iterable[Job], load: Load) -> Iterator[tuple[float, Job]]:
    """The jobs with their arrivals, as many as the load has."""
    times = repeat(0.0) if load.times is None else load.times
    for due, job in islice(zip(times, jobs, strict=False), load.requests):
        if load.duration is not None and due >= load.duration:
            return
        yield due, job


async def _until(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> None:
    """Runs `work` to its end, or cancels it at `stop`."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
