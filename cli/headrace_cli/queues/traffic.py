"""`headrace queue record`: writes a model's traffic as a trace that `headrace simulate` replays."""

import asyncio
import csv
import hashlib
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic

from headrace_common.protocol.redis.admin import QueueAdmin
from headrace_common.protocol.redis.client.connection import Connection
from headrace_common.protocol.redis.traffic import RecordedRequest, TrafficRecorder

from ..errors import UsageError
from .queues import QueueSession, queue_of

COLUMNS = ("arrival_seconds", "prompt_tokens", "output_tokens", "tenant")
LOOK = 1.0  # seconds between two looks at the requests that run


class TraceFile:
    """A CSV file of requests. Each is written once it has ended, so they are not in order.

    Tenants are hashed with a key that is not kept: equal ones stay equal within one file only.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key = secrets.token_bytes(32)
        self.requests = 0
        try:
            with path.open("x", newline="") as file:
                csv.writer(file).writerow(COLUMNS)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise UsageError(f"{path} cannot be made", reason) from error

    def add(self, requests: Iterable[RecordedRequest], began: float) -> None:
        """Adds requests of a recording that began at this time."""
        with self._path.open("a", newline="") as file:
            writer = csv.writer(file)
            for request in requests:
                writer.writerow(self._row(request, request.at - began))
                self.requests += 1

    def _row(self, request: RecordedRequest, seconds: float) -> tuple[str | int, ...]:
        tenant = hashlib.blake2b(request.tenant.encode(), key=self._key, digest_size=6)
        output = max(1, request.output_tokens)
        return f"{seconds:.3f}", request.prompt_tokens, output, tenant.hexdigest()


def record(session: QueueSession, model: str | None, path: Path, seconds: float | None) -> None:
    """Records for `seconds`, then until the requests of that time have ended; or until Ctrl-C."""
    trace = TraceFile(path)

    async def run(connection: Connection) -> None:
        name, shards = await queue_of(QueueAdmin(connection), model)
        async with TrafficRecorder(connection, name, shards) as recorder:
            session.output.notes.print(f"Recording {name}; Ctrl-C ends it.", markup=False)
            await _follow(recorder, trace, seconds)

    try:
        session.connect(run)
    except KeyboardInterrupt:
        pass  # what has ended until then is written
    done = {"requests": trace.requests, "file": str(path)}
    session.output.tell(done, f"Requests written to {path}: {trace.requests}.")


async def _follow(
    recorder: TrafficRecorder,
    trace: TraceFile,
    seconds: float | None,
    clock: Callable[[], float] = monotonic,
) -> None:
    end = None if seconds is None else clock() + seconds
    while end is None or clock() < end:
        trace.add(await recorder.ended(), recorder.began)
        await asyncio.sleep(LOOK if end is None else max(0.0, min(LOOK, end - clock())))
    await recorder.ignore_new()
    while recorder.running:
        trace.add(await recorder.ended(), recorder.began)
        await asyncio.sleep(LOOK)
