"""`headrace queue`: shows and repairs the queues of a running system, as tables or JSON."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from headrace_common.errors import BackendUnavailable, BackendUnfit, SettingsError
from headrace_common.protocol.base import EngineStatus
from headrace_common.protocol.redis.admin import DeadLetter, QueueAdmin, QueueStatus
from headrace_common.protocol.redis.client.connection import Connection, ConnectionConfig
from headrace_common.protocol.redis.client.endpoint import masked
from headrace_common.protocol.redis.loads import MOST as MOST_LOADS
from headrace_common.protocol.redis.sealing_check import SealingCheck
from headrace_common.sealing.keyring import KeyringError, read_keyring
from headrace_common.sealing.sealer import NULL_SEALER, Sealer, SealingError

from ..datadir import DataDir
from ..errors import CliError, UsageError
from ..running import find_named, find_running
from ..servers.valkey import socket_url
from ..tables import Output, plain_table

DEFAULT_URL = "redis://127.0.0.1:6379/0"
MOST_LETTERS = 10_000
SOCKET = "valkey.sock"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QueueSession:
    """Access to the queues at `url`."""

    url: str
    output: Output
    sealing_keys_file: Path | None = None

    def run(self, work: Callable[[QueueAdmin], Awaitable[T]]) -> T:
        """Raises CliError."""
        return self.connect(lambda connection: work(QueueAdmin(connection)))

    def connect(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Raises CliError."""
        try:
            return asyncio.run(self._connected(work))
        except SettingsError as error:
            raise UsageError(f"{masked(self.url)} is not a Redis URL", str(error)) from error
        except (BackendUnavailable, BackendUnfit) as error:
            raise CliError(f"cannot use the queue at {masked(self.url)}: {error}") from error
        except SealingError as error:
            raise UsageError(str(error), "name the keys with --sealing-keys-file") from error

    async def _connected(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        connection = Connection(ConnectionConfig(url=self.url), self._sealer())
        try:
            if connection.sealer.opens:
                await SealingCheck(connection).start()
            return await work(connection)
        finally:
            await connection.close()

    def _sealer(self) -> Sealer:
        if self.sealing_keys_file is None:
            return NULL_SEALER
        from headrace_common.sealing.aes import AesSealer

        try:
            return AesSealer(read_keyring(self.sealing_keys_file.read_bytes()), "accept")
        except (OSError, KeyringError) as error:
            raise UsageError(f"{self.sealing_keys_file} cannot be read", str(error)) from error


def queue_url(given: str | None, data_dir: Path) -> str:
    """The given URL, else that of a `headrace up` that runs with this folder, else the default.

    Raises UsageError if nothing runs with a folder other than the default one.
    """
    if given is not None:
        return given
    # An `up` that has not started all processes yet has a socket only.
    socket = DataDir(data_dir).queue / SOCKET
    if find_running(data_dir) is None and socket.exists():
        return socket_url(socket)
    running = find_named(data_dir)
    return DEFAULT_URL if running is None else running.redis


def show_status(session: QueueSession, models: Sequence[str] | None) -> None:
    async def read(admin: QueueAdmin) -> list[QueueStatus]:
        known = await admin.models()
        wanted = known if models is None else {name: known.get(name, 1) for name in models}
        return [await admin.status(model, shards) for model, shards in wanted.items()]

    found = session.run(read)
    data = [
        {
            **asdict(one),
            "engines": [asdict(engine) for engine in one.engines],
            "starts": [asdict(start) for start in one.starts],
        }
        for one in found
    ]
    table = plain_table(
        "model", "waiting", "tokens", "running", "oldest", "ended/s", "dead", "engines"
    )
    for one in found:
        engines = f"{len(one.engines)}" + _idle_engines(one.engines)
        engines += "".join(f", starting: {start.phase}" for start in one.starts)
        depth = one.depth
        table.add_row(
            one.model, str(depth.waiting), str(depth.waiting_tokens), str(depth.pending),
            _seconds(depth.oldest_age), f"{one.drain_rate:.2f}", str(depth.dead_letters), engines,
        )  # fmt: skip
    session.output.show(data, table)


def _idle_engines(engines: Sequence[EngineStatus]) -> str:
    """The numbers of engines that take no work, in parentheses."""
    draining = sum(engine.draining for engine in engines)
    asleep = sum(engine.sleep_level > 0 for engine in engines)
    counts = {"draining": draining, "asleep": asleep}
    found = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return f" ({found})" if found else ""


def show_requests(session: QueueSession, model: str | None, *, limit: int, running: bool) -> None:
    found = session.run(lambda admin: _peek(admin, model, limit, running))
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
    session.output.show(found, table)


async def _peek(
    admin: QueueAdmin, model: str | None, limit: int, running: bool
) -> list[dict[str, Any]]:
    name, shards = await queue_of(admin, model)
    found = await admin.peek(name, shards, limit=limit, running=running)
    return [asdict(one) for one in found]


def show_dead(session: QueueSession, model: str | None, limit: int) -> None:
    async def read(admin: QueueAdmin) -> tuple[list[DeadLetter], int]:
        name, shards = await queue_of(admin, model)
        return await admin.dead(name, shards, limit=limit), await admin.died_loading(name)

    found, died = session.run(read)
    if died >= MOST_LOADS:
        session.output.notes.print(
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
    session.output.show([{**asdict(letter), "at": _time(letter)} for letter in found], table)


def replay(
    session: QueueSession, model: str | None, request_ids: Sequence[str] | None, timeout: float
) -> None:
    async def run(admin: QueueAdmin) -> list[str]:
        name, shards = await queue_of(admin, model)
        letters = _chosen(await admin.dead(name, shards, limit=MOST_LETTERS), request_ids)
        return [
            letter.request_id
            for letter in letters
            if await admin.replay(name, letter, seconds=timeout)
        ]

    done = session.run(run)
    refused = sorted(set(request_ids or ()) - set(done))
    if refused:
        raise CliError(
            f"{', '.join(refused)} cannot be replayed: what was asked is not kept any more, or it "
            f"is queued already; {len(done)} others are queued again"
        )
    session.output.tell({"replayed": done}, f"Queued again: {len(done)}.")


def purge(session: QueueSession, model: str | None, request_ids: Sequence[str] | None) -> None:
    async def run(admin: QueueAdmin) -> int:
        name, shards = await queue_of(admin, model)
        letters = await admin.dead(name, shards, limit=MOST_LETTERS)
        return await admin.purge_dead(name, _chosen(letters, request_ids))

    done = session.run(run)
    session.output.tell({"purged": done}, f"Dead letters forgotten: {done}.")


def cancel_waiting(session: QueueSession, model: str | None) -> None:
    async def run(admin: QueueAdmin) -> int:
        return await admin.purge_waiting(*await queue_of(admin, model))

    done = session.run(run)
    session.output.tell({"cancelled": done}, f"Requests cancelled: {done}.")


async def queue_of(admin: QueueAdmin, model: str | None) -> tuple[str, int]:
    """A model and the shards of its queue; without a name the only model.

    Raises UsageError if there is no model, not this one, or several without a name.
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
    """The dead letters of these requests, or all for None. Raises UsageError if one is missing."""
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
