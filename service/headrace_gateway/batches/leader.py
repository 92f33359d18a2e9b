"""Leads batches that have no leader, several at a time. Each gateway has one BatchLeader.

When this gateway stops, it leaves its batches to others at once.
"""

import asyncio
import logging
from functools import partial

from headrace_common.errors import BackendUnavailable, HeadraceError

from ..queue_client.drain import Drain
from .run import BatchContext, BatchRun, LeaseLost

logger = logging.getLogger(__name__)

# Seconds between searches for batches of gateways that died; a new batch begins at once.
POLL_S = 2.0


class BatchLeader:
    """Leads at most `running` batches at once."""

    def __init__(self, context: BatchContext, drain: Drain, *, running: int) -> None:
        self._context = context
        self._drain = drain
        self._most = running
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._new = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._lead(), name="batches")

    def wake(self) -> None:
        """Notes that there may be a new batch."""
        self._new.set()

    async def close(self) -> None:
        """Stops leading."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._leave_all()

    async def _lead(self) -> None:
        while not self._drain.draining:
            self._new.clear()
            try:
                await self._take_over()
            except BackendUnavailable as error:
                logger.warning("redis unavailable, batches wait", extra={"error": str(error)})
            try:
                async with asyncio.timeout(POLL_S):
                    await self._new.wait()
            except TimeoutError:
                continue
        await self._leave_all()

    async def _take_over(self) -> None:
        for batch_id in await self._context.batches.open():
            if len(self._runs) >= self._most:
                return
            if batch_id in self._runs:
                continue
            if await self._context.batches.lead(batch_id, self._context.leader):
                run = asyncio.create_task(self._run(batch_id), name=f"batch {batch_id}")
                self._runs[batch_id] = run
                run.add_done_callback(partial(self._forget, batch_id))

    def _forget(self, batch_id: str, _: "asyncio.Task[None]") -> None:
        self._runs.pop(batch_id, None)

    async def _run(self, batch_id: str) -> None:
        fields = {"batch_id": batch_id}
        try:
            batch = await self._context.batches.get(batch_id)
            await BatchRun(self._context, batch).run()
            logger.info("batch ended", extra=fields)
            await self._context.batches.leave(batch_id, self._context.leader)
        except (LeaseLost, BackendUnavailable):
            logger.warning("batch left to other gateways", extra=fields)
        except HeadraceError as error:
            # The batch is led again once the lease has lapsed, and forgotten when it expires.
            logger.error("batch cannot be run", extra={**fields, "error": str(error)})
        except Exception:
            logger.exception("batch failed", extra=fields)

    async def _leave_all(self) -> None:
        left = dict(self._runs)
        for task in left.values():
            task.cancel()
        await asyncio.gather(*left.values(), return_exceptions=True)
        for batch_id in left:
            try:
                await self._context.batches.leave(batch_id, self._context.leader)
            except BackendUnavailable:
                return  # the leases lapse
