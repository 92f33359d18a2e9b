"""`headrace adapters`: the adapters that a model's engines load while they serve."""

import getpass
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from headrace_common.protocol.adapter_control import AdapterControl
from headrace_common.protocol.adapters import (
    Adapter,
    AdapterError,
    AdapterReport,
    AdapterState,
    new_adapter,
)
from headrace_common.protocol.redis.adapters import RedisAdapterSets
from headrace_common.protocol.redis.admin import QueueAdmin
from headrace_common.protocol.redis.client.connection import Connection
from headrace_common.protocol.redis.gateway import RedisGatewayQueue
from headrace_common.wire import keys

from ..errors import CliError
from ..tables import plain_table
from .queues import QueueSession, queue_of


def show_adapters(session: QueueSession, model: str | None, *, retired: bool) -> None:
    """Shows a model's adapters, and how many engines have each. Raises CliError."""

    async def read(connection: Connection) -> list[dict[str, Any]]:
        name, control = await _control(connection, model)
        reports = await control.reports(name)
        return [
            _row(adapter, reports)
            for adapter in (await control.settle(name)).adapters
            if retired or adapter.state is not AdapterState.RETIRED
        ]

    found = session.connect(read)
    table = plain_table("adapter", "state", "engines", "path", "by", "since", "refused")
    for row in found:
        table.add_row(
            row["name"], row["state"], f"{row['engines']}/{row['working']}", row["path"],
            row["by"], row["since"], row["refused"],
        )  # fmt: skip
    session.output.show(found, table)


def load_adapter(
    session: QueueSession, model: str | None, name: str, path: str, *, replaces: bool, wait: float
) -> None:
    """Has a model's engines load an adapter. Raises CliError."""

    async def load(connection: Connection) -> None:
        queue, control = await _control(connection, model)
        adapter = new_adapter(name, path, getpass.getuser(), connection.clock.now())
        await control.load(queue, adapter, replaces=replaces, patience=wait)

    _changed(session, load)
    session.output.tell({"loaded": name}, f"{name} is served.")


def unload_adapter(session: QueueSession, model: str | None, name: str) -> None:
    """Serves an adapter no longer. Raises CliError."""

    async def unload(connection: Connection) -> None:
        queue, control = await _control(connection, model)
        await control.unload(queue, name)

    _changed(session, unload)
    session.output.tell({"unloaded": name}, f"{name} is no longer served.")


def _changed(session: QueueSession, work: Callable[[Connection], Awaitable[None]]) -> None:
    try:
        session.connect(work)
    except AdapterError as error:
        raise CliError(str(error)) from error


async def _control(connection: Connection, model: str | None) -> tuple[str, AdapterControl]:
    name, _ = await queue_of(QueueAdmin(connection), model)
    await connection.measure_clock(keys.adapter_set(name))
    engines = RedisGatewayQueue(connection, "").engines
    return name, AdapterControl(RedisAdapterSets(connection), engines, connection.clock.now)


def _row(adapter: Adapter, reports: Mapping[str, AdapterReport]) -> dict[str, Any]:
    name = adapter.adapter_id
    reasons = [each.refused[name] for each in reports.values() if name in each.refused]
    return {
        "name": adapter.name,
        "state": adapter.state.value,
        "engines": sum(name in each.loaded for each in reports.values()),
        "working": len(reports),
        "path": adapter.path,
        "by": adapter.by,
        "since": datetime.fromtimestamp(adapter.created, UTC).isoformat(timespec="seconds"),
        "refused": next(iter(reasons), ""),
    }
