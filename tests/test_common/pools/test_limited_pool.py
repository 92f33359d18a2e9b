"""Processes that may be killed: each limit, and that no other task is affected."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from headrace_common.pools.limited_pool import KillReason, LimitedPool, TaskKilled, TaskLimits
from headrace_testing import pool_tasks
from headrace_testing.pids import alive
from headrace_testing.processes import until

PRELOAD = ["headrace_testing.pool_tasks"]
GENEROUS = TaskLimits(timeout=200, cpu_seconds=100)


@pytest.fixture
async def pool() -> AsyncIterator[LimitedPool]:
    pool = LimitedPool(2, GENEROUS, PRELOAD)
    yield pool
    await pool.close()


async def pid_in(marker: Path) -> int:
    def read() -> int:
        until(lambda: marker.exists() and bool(marker.read_text()), "the task to begin")
        return int(marker.read_text())

    return await asyncio.to_thread(read)


async def end_of(pid: int) -> None:
    await asyncio.to_thread(until, lambda: not alive(pid), "the process to end")


def oom_score(pid: int) -> str:
    return Path(f"/proc/{pid}/oom_score_adj").read_text().strip()


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (pool_tasks.crash, KillReason.DIED),
        (pool_tasks.kill, KillReason.DIED),
        (pool_tasks.abort, KillReason.MEMORY),
    ],
)
async def test_a_task_that_ends_its_process_costs_one_error(
    pool: LimitedPool, task: Callable[[], None], reason: KillReason
) -> None:
    with pytest.raises(TaskKilled) as caught:
        await pool.run(task)

    assert caught.value.reason is reason
    assert await pool.run(pool_tasks.say, "well") == "well"


@pytest.mark.parametrize(
    ("limits", "task", "reason"),
    [
        (TaskLimits(timeout=0.3), pool_tasks.wait, KillReason.TIMEOUT),
        (TaskLimits(timeout=200, cpu_seconds=1), pool_tasks.spin, KillReason.CPU),
    ],
)
async def test_a_task_over_its_time_is_ended_with_its_process(
    tmp_path: Path, limits: TaskLimits, task: Callable[[str], None], reason: KillReason
) -> None:
    pool, marker = LimitedPool(1, limits, PRELOAD), tmp_path / "pid"
    with pytest.raises(TaskKilled) as caught:
        await pool.run(task, str(marker))

    assert caught.value.reason is reason
    await end_of(await pid_in(marker))
    await pool.close()


async def test_memory_is_limited_for_each_task_separately() -> None:
    pool = LimitedPool(1, TaskLimits(timeout=200, memory_bytes=64 * pool_tasks.MIB), PRELOAD)
    for _ in range(3):
        assert await pool.run(pool_tasks.fill, 48)
        with pytest.raises(TaskKilled) as caught:
            await pool.run(pool_tasks.fill, 80)
        assert caught.value.reason is KillReason.MEMORY
    await pool.close()


async def test_an_exception_of_a_task_is_raised(pool: LimitedPool) -> None:
    with pytest.raises(ValueError, match="a reason"):
        await pool.run(pool_tasks.fail, "a reason")


async def test_a_cancelled_task_is_killed(pool: LimitedPool, tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    task = asyncio.create_task(pool.run(pool_tasks.spin, str(marker)))
    pid = await pid_in(marker)
    task.cancel()

    await end_of(pid)
    assert await pool.run(pool_tasks.say, "well") == "well"


async def test_idle_processes_may_die(pool: LimitedPool) -> None:
    """The fork server that starts them may die, too."""
    worker = psutil.Process(await pool.run(pool_tasks.pid))
    server = worker.parent()
    assert server is not None and "forkserver" in " ".join(server.cmdline())

    for _ in range(3):
        os.kill(await pool.run(pool_tasks.pid), signal.SIGKILL)
        assert await pool.run(pool_tasks.say, "well") == "well"
    server.kill()
    await end_of(server.pid)
    os.kill(await pool.run(pool_tasks.pid), signal.SIGKILL)

    assert await pool.run(pool_tasks.say, "well") == "well"


async def test_a_task_survives_the_server_of_its_process(pool: LimitedPool, tmp_path: Path) -> None:
    """The pool then treats the process as dead."""
    marker = tmp_path / "pid"
    task = asyncio.create_task(pool.run(pool_tasks.wait_once, str(marker)))
    server = psutil.Process(await pid_in(marker)).parent()
    assert server is not None
    server.kill()

    assert await task == "well"


async def test_processes_without_work_end() -> None:
    pool = LimitedPool(1, GENEROUS, PRELOAD, idle=0.05)
    first = await pool.run(pool_tasks.pid)
    await end_of(first)

    assert await pool.run(pool_tasks.pid) != first
    await pool.close()


async def test_workers_are_the_first_victims_of_memory_shortage_and_end_with_their_parent(
    pool: LimitedPool, tmp_path: Path
) -> None:
    marker = tmp_path / "pid"
    task = asyncio.create_task(pool.run(pool_tasks.spin, str(marker)))
    pid = await pid_in(marker)

    worker, lower = psutil.Process(pid), min(19, psutil.Process().nice() + 10)
    server = worker.parent()
    assert server is not None
    assert worker.nice() == lower == server.nice()
    assert oom_score(pid) == "1000"

    await pool.close()
    await end_of(pid)
    with pytest.raises(asyncio.CancelledError):
        await task
