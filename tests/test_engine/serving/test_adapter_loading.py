"""An engine follows its model's set of adapters; the runner's part is a recorder."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace_common.protocol.adapters import Adapter, AdapterSet, new_adapter
from headrace_common.wire.messages import adapter_key
from headrace_engine.core.errors import CheckpointError
from headrace_engine.engine.engine import Engine
from headrace_engine.lora.adapters import LoadedAdapter
from headrace_engine.serving.adapter_loading import RETRY_S, AdapterLoading
from headrace_testing.backends import MODEL, InMemory
from headrace_testing.engine import make_config
from headrace_testing.fake_runner import FakeRunner
from headrace_testing.waiting import eventually
from headrace_testing.workers import make_worker

ONE, TWO = "1" * 32, "2" * 32


@dataclass
class Runner:
    """`digests` by the names of folders; a folder without one is refused."""

    digests: dict[str, str]
    installed: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)

    def read_adapter(self, folder: Path) -> LoadedAdapter:
        self.reads.append(folder.name)
        if folder.name not in self.digests:
            raise CheckpointError(f"{folder.name} does not fit")
        unused: Any = None
        return LoadedAdapter(unused, unused, self.digests[folder.name])

    def install_adapter(self, name: str, adapter: LoadedAdapter) -> None:
        self.installed.append(name)

    def remove_adapter(self, name: str) -> None:
        self.installed.remove(name)


class Loop:
    """Runs an action of `between_steps` at once."""

    def between_steps(self, action: Callable[[], None]) -> None:
        action()


class Queue:
    engine_id = "e"
    served: list[str] = []

    def serve_adapters(self, adapters: list[str]) -> None:
        self.served = list(adapters)


class Follower:
    """An AdapterLoading that makes one turn and one report for each call of `turn`."""

    def __init__(self, folder: Path, digests: dict[str, str], **options: Any) -> None:
        self.backend, self.now = InMemory(), 0.0
        self.sets, self.runner = self.backend.adapter_sets(), Runner(digests)
        self.queue, self.in_use, self.draining = Queue(), set[str](), False
        for name in ("sql", "other", "bad"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self.loading = AdapterLoading(
            self.sets, self.runner, MODEL, folder, clock=lambda: self.now, **options
        )
        self._set = AdapterSet()

    async def start(self) -> None:
        queue: Any = self.queue
        loop: Any = Loop()
        await self.loading.start(queue, loop, lambda: self.draining)

    async def turn(self) -> None:
        await self.loading.turn(self.in_use)
        await self.loading.report()

    async def change(self, change: Callable[[AdapterSet], AdapterSet]) -> None:
        new = change(self._set)
        assert await self.sets.replace(MODEL, self._set, new)
        self._set = new

    async def add(self, path: str, name: str = "sql") -> Adapter:
        adapter = new_adapter(name, path, "test", 1.0)
        await self.change(lambda known: known.added(adapter))
        return adapter

    async def confirm(self, adapter: Adapter, digest: str) -> None:
        await self.change(lambda known: known.confirmed(adapter.adapter_id, digest, 100.0))

    async def report(self) -> tuple[dict[str, str], dict[str, str]]:
        (report,) = (await self.sets.reports(MODEL, ["e"])).values()
        return dict(report.loaded), dict(report.refused)


async def test_an_engine_loads_the_set_before_it_takes_work(tmp_path: Path) -> None:
    follower = Follower(tmp_path, {"sql": ONE})
    adapter = await follower.add("sql")

    await follower.start()

    assert follower.runner.installed == follower.queue.served == [adapter_key("sql", ONE)]
    assert await follower.report() == ({adapter.adapter_id: ONE}, {})


async def test_an_adapter_that_does_not_fit_is_reported_and_tried_again(tmp_path: Path) -> None:
    follower = Follower(tmp_path, {"sql": ONE})
    good, bad = await follower.add("sql"), await follower.add("bad", "other")
    await follower.start()
    await follower.turn()
    refused = {bad.adapter_id: "bad does not fit"}
    assert await follower.report() == ({good.adapter_id: ONE}, refused)
    assert follower.runner.reads == ["sql", "bad"]

    follower.now, follower.runner.digests["bad"] = RETRY_S, TWO
    await follower.turn()

    assert await follower.report() == ({good.adapter_id: ONE, bad.adapter_id: TWO}, {})
    assert follower.queue.served == [adapter_key("other", TWO), adapter_key("sql", ONE)]


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", "sql/../.."])
async def test_only_folders_inside_of_the_root_are_loaded(tmp_path: Path, path: str) -> None:
    follower = Follower(tmp_path, {})
    adapter = await follower.add(path)

    await follower.start()
    await follower.turn()

    _, refused = await follower.report()
    assert "lora_dir only" in refused[adapter.adapter_id]
    assert follower.runner.reads == []


async def test_hub_ids_are_fetched_where_that_is_allowed(tmp_path: Path) -> None:
    fetched: list[str] = []

    def fetch(source: str) -> Path:
        fetched.append(source)
        return tmp_path / "other"

    (tmp_path / "other").mkdir()
    (tmp_path / "allowed" / "org" / "folder").mkdir(parents=True)
    allowed = Follower(tmp_path / "allowed", {"folder": ONE, "other": TWO}, fetch=fetch)
    forbidden = Follower(tmp_path / "forbidden", {})
    for follower in (allowed, forbidden):
        await follower.add("org/sql@v1.2")
        await follower.add("org/folder", "local")
        await follower.start()
        await follower.turn()

    assert fetched == ["org/sql@v1.2"]
    assert allowed.queue.served == [adapter_key("local", ONE), adapter_key("sql", TWO)]
    assert forbidden.queue.served == []


async def test_object_storage_is_read_where_that_is_allowed(tmp_path: Path) -> None:
    asked: list[tuple[str, int]] = []

    @contextmanager
    def fetched(uri: str, room: int) -> Iterator[Path]:
        asked.append((uri, room))
        yield tmp_path / "sql"

    allowed = Follower(tmp_path / "a", {"sql": ONE}, fetched=fetched, available=lambda: 99)
    forbidden = Follower(tmp_path / "f", {"sql": ONE})
    for follower in (allowed, forbidden):
        adapter = await follower.add("s3://adapters/sql")
        await follower.start()
        await follower.turn()

    assert asked == [("s3://adapters/sql", 99)]
    assert allowed.queue.served == [adapter_key("sql", ONE)]
    _, refused = await forbidden.report()
    assert "set lora_object_storage" in refused[adapter.adapter_id]


async def test_an_adapter_for_which_memory_is_short_is_refused(tmp_path: Path) -> None:
    follower = Follower(tmp_path, {"sql": ONE}, available=lambda: 99)
    (tmp_path / "sql" / "adapter_model.safetensors").write_bytes(b"x" * 100)
    adapter = await follower.add("sql")

    await follower.start()
    await follower.turn()

    _, refused = await follower.report()
    text = f"{tmp_path / 'sql'}: has 100 bytes, but only 99 are free"
    assert refused == {adapter.adapter_id: text}


async def test_a_removed_adapter_stays_while_the_set_or_a_request_has_it(tmp_path: Path) -> None:
    follower = Follower(tmp_path, {"sql": ONE})
    adapter, key = await follower.add("sql"), adapter_key("sql", ONE)
    await follower.start()
    await follower.confirm(adapter, ONE)
    await follower.change(lambda known: known.retired("sql", 100.0))
    await follower.turn()
    assert follower.queue.served == follower.runner.installed == [key]

    follower.in_use = {key}
    await follower.change(lambda known: known.without_expired(100.0))
    await follower.turn()
    assert (follower.queue.served, follower.runner.installed) == ([], [key])

    follower.in_use = set()
    await follower.turn()
    assert follower.runner.installed == []


async def test_a_new_version_is_another_adapter_beside_the_old_one(tmp_path: Path) -> None:
    follower = Follower(tmp_path, {"sql": ONE, "other": TWO})
    await follower.confirm(await follower.add("sql"), ONE)
    await follower.start()
    await follower.confirm(await follower.add("other"), TWO)

    await follower.turn()

    assert follower.queue.served == [adapter_key("sql", ONE), adapter_key("sql", TWO)]


async def test_files_other_than_those_that_are_served_are_refused(tmp_path: Path) -> None:
    follower = Follower(tmp_path, {"sql": TWO})
    adapter = await follower.add("sql")
    await follower.start()
    assert follower.queue.served == [adapter_key("sql", TWO)]

    await follower.confirm(adapter, ONE)  # by another engine's report
    await follower.turn()

    loaded, refused = await follower.report()
    assert (loaded, follower.queue.served) == ({}, [])
    assert "not those that the first engine loaded" in refused[adapter.adapter_id]


async def test_an_engine_writes_the_set_again_if_redis_has_lost_it(tmp_path: Path) -> None:
    follower = Follower(tmp_path, {"sql": ONE})
    await follower.confirm(await follower.add("sql"), ONE)
    await follower.start()
    known = await follower.sets.read(MODEL)
    await follower.backend.wipe()

    await follower.turn()

    assert await follower.sets.read(MODEL) == known
    assert follower.queue.served == [adapter_key("sql", ONE)]


async def test_adapters_stay_while_redis_is_unreachable(tmp_path: Path) -> None:
    follower = Follower(tmp_path, {"sql": ONE})
    await follower.add("sql")
    await follower.start()
    follower.backend.store.available = False
    await follower.turn()
    follower.backend.store.available = True

    assert follower.queue.served == [adapter_key("sql", ONE)]


async def test_an_engine_that_drains_reports_nothing(tmp_path: Path) -> None:
    follower = Follower(tmp_path, {"sql": ONE})
    await follower.start()
    follower.draining = True
    await follower.add("sql")

    await follower.turn()

    assert await follower.sets.reports(MODEL, ["e"]) == {}
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_engine_reports_its_adapters_while_it_fetches_another_one(tmp_path: Path) -> None:
    fetching, go_on = threading.Event(), threading.Event()

    def fetch(source: str) -> Path:
        fetching.set()
        assert go_on.wait(timeout=60)
        return tmp_path / "other"

    digests = {"sql": ONE, "other": TWO}
    follower = Follower(
        tmp_path, digests, fetch=fetch, sleep=lambda seconds: asyncio.sleep(seconds / 100)
    )
    ready = await follower.add("sql")
    runner = FakeRunner()
    queue = follower.backend.engine("e")
    worker = make_worker(
        Engine(make_config(), runner), queue, runner.block_size, adapters=follower.loading
    )
    running = asyncio.create_task(worker.run())

    async def reported() -> bool:
        return bool(await follower.sets.reports(MODEL, ["e"]))

    try:
        await eventually(reported)
        late = await follower.add("org/sql", "late")
        assert await asyncio.to_thread(fetching.wait, 60)
        follower.backend.store.adapter_reports.clear()  # as after a lease

        await eventually(reported)
        assert await follower.report() == ({ready.adapter_id: ONE}, {})
        go_on.set()

        async def loaded() -> bool:
            return late.adapter_id in (await follower.report())[0]

        await eventually(loaded)
    finally:
        go_on.set()
        worker.end()
        await running
