"""`headrace usage export`: sends the ledger as CloudEvents, in the form that OpenMeter takes.

Entries are sent in batches, in order, and acknowledged only when the server has accepted them: each
is sent at least once, always with the same id.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from itertools import count
from time import monotonic
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from headrace_common.errors import BackendUnavailable
from headrace_common.protocol.ledger import UsageEntry
from headrace_common.protocol.redis.client.connection import Connection
from headrace_common.protocol.redis.ledger import LedgerReader

from .queues import QueueSession
from .usage_report import as_row, ledgers

logger = logging.getLogger(__name__)

CONTENT_TYPE = "application/cloudevents-batch+json"
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
TIMEOUT = 30.0  # seconds for one batch
LOOK_AGAIN = 60.0  # seconds between two looks for models


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Where entries are sent. Times are in seconds. `token` is a bearer token. With `once` the
    export ends when all entries have been sent."""

    url: str
    group: str = "export"
    models: Sequence[str] | None = None
    most: int = 100
    interval: float = 1.0
    source: str = "headrace"
    event_type: str = "headrace.request"
    token: str | None = None
    once: bool = False


def export(session: QueueSession, options: ExportOptions) -> None:
    """Raises CliError."""
    session.connect(lambda connection: run(connection, options))


async def run(connection: Connection, options: ExportOptions) -> None:
    """Sends entries until the process ends, or with `once` until there are none."""
    while True:
        try:
            if await _run(connection, options):
                return
        except BackendUnavailable as error:
            if options.once:
                raise
            logger.warning("redis unavailable, usage is sent later: %s", error)
            await asyncio.sleep(options.interval)


async def _run(connection: Connection, options: ExportOptions) -> bool:
    """Sends entries for LOOK_AGAIN seconds; first those that were not acknowledged before.

    Returns whether the export has ended.
    """
    reader = LedgerReader(connection, await ledgers(connection, options.models))
    await reader.join(options.group)
    looked, again = monotonic(), True
    while monotonic() - looked < LOOK_AGAIN:
        batch = await reader.next(options.group, options.most, again=again)
        if batch:
            await send(options, batch.entries)
            await reader.acknowledge(options.group, batch)
        elif again:
            again = False
        elif options.once:
            return True
        else:
            await asyncio.sleep(options.interval)
    return False


def event(entry: UsageEntry, options: ExportOptions) -> dict[str, Any]:
    """An entry as a CloudEvent. Its subject is the tenant, to whom usage is billed."""
    fields = as_row(entry)
    return {
        "specversion": "1.0",
        "id": fields.pop("id"),
        "source": options.source,
        "type": options.event_type,
        "subject": entry.tenant,
        "time": fields["ended"],
        "datacontenttype": "application/json",
        "data": fields,
    }


async def send(options: ExportOptions, entries: Sequence[UsageEntry]) -> None:
    """Sends a batch until the server accepts it, with growing pauses."""
    if not entries:
        return
    headers = {"Content-Type": CONTENT_TYPE}
    if options.token is not None:
        headers["Authorization"] = f"Bearer {options.token}"
    body = json.dumps([event(entry, options) for entry in entries]).encode()
    request = Request(options.url, body, headers, method="POST")  # noqa: S310 - the scheme is checked
    for attempt in count():
        problem, asked = await asyncio.to_thread(_post, request)
        if problem is None:
            return
        pause = asked or min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(attempt, 16))
        logger.warning(
            "usage not accepted, sent again in %.1f s: %d events, %s", pause, len(entries), problem
        )
        await asyncio.sleep(pause)


class _NoRedirects(HTTPRedirectHandler):
    """A redirect would become a GET, and its answer would look like that of the POST."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(request: Request) -> tuple[str | None, float | None]:
    """Returns what went wrong, and the pause in seconds that the server asks for."""
    try:
        build_opener(_NoRedirects).open(request, timeout=TIMEOUT).close()
    except HTTPError as error:
        with error:
            wait = error.headers.get("Retry-After", "")
            reason = error.read(200).decode(errors="replace")
        asked = min(LONGEST_PAUSE, float(wait)) if wait.isascii() and wait.isdigit() else None
        return f"{error.code} {reason}", asked
    except (OSError, HTTPException) as error:
        return repr(error), None
    return None, None
