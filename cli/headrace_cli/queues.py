"""`headrace queue`: shows and repairs the queues of a running system, as tables or JSON."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from headrace_common.errors import BackendUnavailable, BackendUnfit, SettingsError
from headrace_common.protocol.connection import Connection, ConnectionConfig
from headrace_common.protocol.endpoint import masked
from headrace_common.protocol.redis_admin import DeadLetter, QueueAdmin, QueueStatus
from headrace_common.protocol.redis_loads import MOST as MOST_LOADS

from .datadir import DataDir
from .errors import CliError, UsageError
from .tables import plain_table
from .valkey import socket_url

DEFAULT_URL = "redis://127.0.0.1:6379/0"
MOST_LETTERS = 10_000
SOCKET = "valkey.sock"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Desk:
    """Where the queues are and where results go; `notes` is for what a person reads beside them."""

    url: str
    out: Console
    notes: Console
    as_json: bool = False

    def run(self, work: Callable[[QueueAdmin], Awaitable[T]]) -> T:
        """Raises CliError."""
        try:
            return asyncio.run(self._with_admin(work))
        except SettingsError as error:
            raise UsageError(f"{masked(self.url)} is no Redis URL", str(error)) from error
        except (BackendUnavailable, BackendUnfit) as error:
            raise CliError(f"cannot use the queue at {masked(self.url)}: {error}") from error

    async def _with_admin(self, work: Callable[[QueueAdmin], Awaitable[T]]) -> T:
        connection = Connection(ConnectionConfig(url=self.url))
        try:
            return await work(QueueAdmin(connection))
        finally:
            await connection.close()

    def show(self, data: Any, table: Table) -> None:
        if self.as_json:
            self.out.file.write(json.dumps(data, indent=2) + "\n")
        else:
            self.out.print(table)

    def tell(self, data: dict[str, Any], note: str) -> None:
        """The result of a change."""
        if self.as_json:
            self.out.file.write(json.dumps(data, indent=2) + "\n")
        else:
            self.notes.print(note, markup=False)


def queue_url(given: str | None, data_dir: Path) -> str:
    """What was given, else the server of a `headrace up` that runs with this folder."""
    if given is not None:
        return given
    socket = DataDir(data_dir).queue / SOCKET
    return socket_url(socket) if socket.exists() else DEFAULT_URL


def show_status(desk: Desk, models: Sequence[str] | None) -> None:
    async def read(admin: QueueAdmin) -> list[QueueStatus]:
        known = await admin.models()
        wanted = known if models is None else {name: known.get(name, 1) for name in models}
        return [await admin.status(model, shards) for model, shards in wanted.items()]

    found = desk.run(read)
    data = [{**asdict(one), "engines": [asdict(engine) for engine in one.engines]} for one in found]
    table = plain_table(
        "model", "waiting", "tokens", "running", "oldest", "ended/s", "dead", "engines"
    )
    for one in found:
        draining = sum(engine.draining for engine in one.engines)
        engines = f"{len(one.engines)}" + (f" ({draining} draining)" if draining else "")
        depth = one.depth
        table.add_row(
            one.model, str(depth.waiting), str(depth.waiting_tokens), str(depth.pending),
            _seconds(depth.oldest_age), f"{one.drain_rate:.2f}", str(depth.dead_letters), engines,
        )  # fmt: skip
    desk.show(data, table)


def show_requests(desk: Desk, model: str | None, *, limit: int, running: bool) -> None:
    found = desk.run(lambda admin: _peek(admin, model, limit, running))
    table = plain_table(
        "request", "class", "tenant", "age", "deadline in", "prompt", "output", "engine", "attempt",
        "failures",
    )  # fmt: skip
    for one in found:
        table.add_row(
            one["request_id"], one["priority"], one["tenant"], _seconds(one["age"]),
            _seconds(one["deadline_in"]), str(one["prompt_tokens"]), str(one["output_tokens"]),
            one["owner"], str(one["attempt"]), str(one["failures"]),
        )  # fmt: skip
    desk.show(found, table)


async def _peek(
    admin: QueueAdmin, model: str | None, limit: int, running: bool
) -> list[dict[str, Any]]:
    name, shards = await _queue(admin, model)
    found = await admin.peek(name, shards, limit=limit, running=running)
    return [asdict(one) for one in found]


def show_dead(desk: Desk, model: str | None, limit: int) -> None:
    async def read(admin: QueueAdmin) -> tuple[list[DeadLetter], int]:
        name, shards = await _queue(admin, model)
        return await admin.dead(name, shards, limit=limit), await admin.died_loading(name)

    found, died = desk.run(read)
    if died >= MOST_LOADS:
        desk.notes.print(
            f"The model is set aside: {died} gateways died while they loaded its files. Register "
            "others, or wait an hour.",
            markup=False,
        )
    table = plain_table("request", "set aside", "why", "failures", "can be replayed")
    for letter in found:
        table.add_row(
            letter.request_id, _time(letter), letter.why, str(letter.failures),
            "yes" if letter.replayable else "no",
        )  # fmt: skip
    desk.show([{**asdict(letter), "at": _time(letter)} for letter in found], table)


def replay(
    desk: Desk, model: str | None, request_ids: Sequence[str] | None, timeout: float
) -> None:
    async def run(admin: QueueAdmin) -> list[str]:
        name, shards = await _queue(admin, model)
        letters = _chosen(await admin.dead(name, shards, limit=MOST_LETTERS), request_ids)
        return [
            letter.request_id
            for letter in letters
            if await admin.replay(name, letter, seconds=timeout)
        ]

    done = desk.run(run)
    refused = sorted(set(request_ids or ()) - set(done))
    if refused:
        raise CliError(
            f"{', '.join(refused)} cannot be replayed: what was asked is not kept any more, or it "
            f"is queued already; {len(done)} others are queued again"
        )
    desk.tell({"replayed": done}, f"Queued again: {len(done)}.")


def purge(desk: Desk, model: str | None, request_ids: Sequence[str] | None) -> None:
    async def run(admin: QueueAdmin) -> int:
        name, shards = await _queue(admin, model)
        letters = await admin.dead(name, shards, limit=MOST_LETTERS)
        return await admin.purge_dead(name, _chosen(letters, request_ids))

    done = desk.run(run)
    desk.tell({"purged": done}, f"Dead letters forgotten: {done}.")


def cancel_waiting(desk: Desk, model: str | None) -> None:
    async def run(admin: QueueAdmin) -> int:
        return await admin.purge_waiting(*await _queue(admin, model))

    done = desk.run(run)
    desk.tell({"cancelled": done}, f"Requests cancelled: {done}.")


async def _queue(admin: QueueAdmin, model: str | None) -> tuple[str, int]:
    """A model and the shards of its queue; the only model, where none is named.

    Raises UsageError where there are none, not this one, or several to choose from.
    """
    known = await admin.models()
    if not known:
        raise UsageError("there is no queue of any model", "is this the Redis that engines use?")
    if model is not None:
        if model not in known:
            raise UsageError(
                f"there is no queue of {model}", f"there is {', '.join(sorted(known))}"
            )
        return model, known[model]
    if len(known) > 1:
        raise UsageError("there are several models", f"add --model, of {', '.join(sorted(known))}")
    (only,) = known.items()
    return only


def _chosen(
    letters: Sequence[DeadLetter], request_ids: Sequence[str] | None
) -> Sequence[DeadLetter]:
    """Those of the requests; of all, where None. Raises UsageError for one that is not there."""
    if request_ids is None:
        return letters
    unknown = sorted(set(request_ids) - {letter.request_id for letter in letters})
    if unknown:
        raise UsageError(f"there is no dead letter of {', '.join(unknown)}", "see queue dead")
    return [letter for letter in letters if letter.request_id in request_ids]


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if abs(value) < 100 else f"{value:.0f} s"


def _time(letter: DeadLetter) -> str:
    return datetime.fromtimestamp(letter.at, UTC).isoformat(timespec="seconds")
