"""Adapters that engines load while they serve: who gets their requests, how their set changes."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from headrace_common.errors import MessageError
from headrace_common.protocol.adapter_control import AdapterControl
from headrace_common.protocol.adapters import (
    MOST_SERVED,
    Adapter,
    AdapterError,
    AdapterReport,
    AdapterSet,
    AdapterState,
    decode_report,
    decode_set,
    encode_set,
    new_adapter,
)
from headrace_common.protocol.base import (
    Candidate,
    EngineStatus,
    Lease,
    Placement,
    QueueLimits,
)
from headrace_common.wire.messages import (
    GenerateRequest,
    adapter_key,
    adapter_name,
    decode_request,
    encode_request,
)
from headrace_testing.backends import MODEL, Backend, make_request, make_status

LIMITS = QueueLimits()
ONE, TWO = "1" * 32, "2" * 32
SQL = adapter_key("sql", ONE)


def request_for(version: str | None, name: str = "sql", tenant: str = "default") -> GenerateRequest:
    return replace(make_request(), lora=name, lora_version=version, tenant=tenant)


def ids(leases: Sequence[Lease]) -> list[str]:
    return [lease.request.request_id for lease in leases]


async def admitted(backend: Backend, *requests: GenerateRequest) -> list[str]:
    gateway = backend.gateway()
    for request in requests:
        await gateway.admit(request, LIMITS)
    return [request.request_id for request in requests]


def test_a_request_keeps_the_version_of_its_adapter_on_the_wire() -> None:
    request = request_for(ONE)

    assert decode_request(encode_request(request)) == request
    assert request.adapter == SQL
    assert request_for(None).adapter == "sql"
    assert adapter_name(SQL) == "sql" == adapter_name("sql")
    with pytest.raises(MessageError, match="32 hexadecimal digits"):
        decode_request(encode_request(request_for("../x")))


async def test_a_request_goes_to_an_engine_that_has_loaded_its_adapter(backend: Backend) -> None:
    with_it, without, other = backend.engine("a"), backend.engine("b"), backend.engine("c")
    with_it.serve_adapters([SQL])
    other.serve_adapters([adapter_key("sql", TWO)])
    (rid,) = await admitted(backend, request_for(ONE))

    assert await without.take(4) == []
    assert await other.take(4) == []
    assert ids(await with_it.take(4)) == [rid]


async def test_an_engine_takes_the_requests_that_wait_after_one_that_it_cannot_run(
    backend: Backend,
) -> None:
    with_it, without = backend.engine("a"), backend.engine("b")
    with_it.serve_adapters([SQL])
    plain = [replace(make_request(), tenant=f"t{number % 2}") for number in range(4)]
    adapted = [request_for(ONE, tenant=f"t{number % 2}") for number in range(4)]
    later = replace(make_request(), priority=1)
    mixed = [each for pair in zip(adapted, plain, strict=True) for each in pair]
    await admitted(backend, *mixed, later)

    found = ids(await without.take(16))

    assert sorted(found) == sorted(each.request_id for each in [*plain, later])
    assert sorted(ids(await with_it.take(16))) == sorted(each.request_id for each in adapted)


async def test_a_request_that_went_first_without_its_adapter_keeps_no_engine_from_others(
    backend: Backend,
) -> None:
    """An engine prefers a request that is placed with it, and then finds that it lacks the
    adapter."""
    a, b, gateway = backend.engine("a"), backend.engine("b"), backend.gateway()
    plain, adapted = make_request(), request_for(ONE)
    for request, name in ((plain, "a"), (adapted, "b")):
        placement = Placement(
            candidates=(Candidate(engine_id=name, capacity=64),),
            capacity=128,
            load_factor=99,
            hold_ms=3_600_000,
        )
        await gateway.admit(request, LIMITS, placement=placement)

    assert await b.take(4) == []
    assert ids(await a.take(4)) == [plain.request_id]


async def test_a_request_for_an_adapter_of_the_settings_goes_to_any_engine(
    backend: Backend,
) -> None:
    (rid,) = await admitted(backend, request_for(None))

    assert ids(await backend.engine().take(4)) == [rid]


async def test_a_request_that_was_given_back_waits_for_an_engine_with_its_adapter(
    backend: Backend,
) -> None:
    first, without, with_it = backend.engine("a"), backend.engine("b"), backend.engine("c")
    for engine in (first, with_it):
        engine.serve_adapters([SQL])
    (rid,) = await admitted(backend, request_for(ONE))
    assert ids(await first.take(1)) == [rid]
    await first.give_back([rid])

    assert await without.reap(4) == []
    assert ids(await with_it.reap(4)) == [rid]


async def test_a_new_request_wakes_an_engine_that_waits_because_it_lacks_an_adapter(
    backend: Backend,
) -> None:
    """Only the first waiting request is in the stream, so the engine looks again by itself."""
    without = backend.engine("b")
    await admitted(backend, request_for(ONE))
    assert await without.take(4) == []
    (rid,) = await admitted(backend, make_request())

    found: list[str] = []
    async with asyncio.timeout(60):
        while not found:
            await without.wait()
            found = ids(await without.take(4))

    assert found == [rid]


class Engines:
    """The statuses of a model's engines, as a test sets them."""

    def __init__(self, *names: str) -> None:
        self.statuses = [make_status(name) for name in names]

    async def __call__(self, model: str) -> Sequence[EngineStatus]:
        return self.statuses


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def control(backend: Backend, engines: Engines, clock: Clock) -> AdapterControl:
    async def no_sleep(_seconds: float) -> None:
        await asyncio.sleep(0)

    return AdapterControl(backend.adapter_sets(), engines, clock, kept=100.0, sleep=no_sleep)


async def loaded(
    backend: Backend, engines: Engines, name: str, digest: str, *, replaces: bool = False
) -> Adapter:
    """Loads an adapter that the engine a reports at once."""
    adapter = new_adapter(name, f"/adapters/{name}", "test", 1000.0)
    sets = backend.adapter_sets()
    before = (await sets.reports(MODEL, ["a"])).get("a", AdapterReport())
    report = AdapterReport({**before.loaded, adapter.adapter_id: digest})
    await sets.report(MODEL, "a", report)
    return await control(backend, engines, Clock()).load(
        MODEL, adapter, replaces=replaces, patience=60
    )


async def test_an_adapter_is_served_once_one_engine_has_it(backend: Backend) -> None:
    engines = Engines("a", "b")
    adapter = await loaded(backend, engines, "sql", ONE)

    assert (adapter.state, adapter.digest) == (AdapterState.READY, ONE)
    sets = backend.adapter_sets()
    known = await sets.read(MODEL)
    assert known.ready() == {"sql": adapter}
    assert await sets.version(MODEL) == known.version == (await sets.versions())[MODEL]


async def test_an_adapter_that_all_engines_refuse_leaves_the_set_as_it_was(
    backend: Backend,
) -> None:
    engines = Engines("a", "b")
    first = await loaded(backend, engines, "sql", ONE)
    adapter, sets = new_adapter("sql", "/adapters/bad", "test", 1001.0), backend.adapter_sets()
    for name in ("a", "b"):
        report = AdapterReport({first.adapter_id: ONE}, {adapter.adapter_id: "rank 64 is too much"})
        await sets.report(MODEL, name, report)

    with pytest.raises(AdapterError, match="rank 64 is too much"):
        await control(backend, engines, Clock()).load(MODEL, adapter, replaces=True, patience=60)

    assert (await sets.read(MODEL)).adapters == (first,)


async def test_an_adapter_that_no_engine_loads_in_time_is_withdrawn(backend: Backend) -> None:
    adapter, engines = new_adapter("sql", "/adapters/sql", "test", 1000.0), Engines()

    with pytest.raises(AdapterError, match="start one that loads adapters"):
        await control(backend, engines, Clock()).load(MODEL, adapter, replaces=False, patience=0)

    assert (await backend.adapter_sets().read(MODEL)).adapters == ()


async def test_a_name_is_taken_until_it_is_unloaded(backend: Backend) -> None:
    engines, clock = Engines("a"), Clock()
    first = await loaded(backend, engines, "sql", ONE)
    with pytest.raises(AdapterError, match="'sql' has already been loaded"):
        await loaded(backend, engines, "sql", TWO)

    second = await loaded(backend, engines, "sql", TWO, replaces=True)

    sets = backend.adapter_sets()
    known = await sets.read(MODEL)
    assert known.ready() == {"sql": second}
    assert known.find(first.adapter_id) == replace(first, state=AdapterState.RETIRED, until=1100.0)
    await control(backend, engines, clock).unload(MODEL, "sql")
    assert (await sets.read(MODEL)).ready() == {}
    with pytest.raises(AdapterError, match="'sql' cannot be found"):
        await control(backend, engines, clock).unload(MODEL, "sql")


async def test_a_retired_adapter_is_kept_until_no_request_can_use_it(backend: Backend) -> None:
    engines, clock = Engines("a"), Clock()
    adapter = await loaded(backend, engines, "sql", ONE)
    by = control(backend, engines, clock)
    await by.unload(MODEL, "sql")
    clock.now = 1099.0
    assert (await by.settle(MODEL)).find(adapter.adapter_id) is not None

    clock.now = 1100.0
    assert (await by.settle(MODEL)).adapters == ()


async def test_changes_at_the_same_time_are_all_kept(backend: Backend) -> None:
    engines = Engines("a")
    names = [f"sql-{number}" for number in range(8)]
    sets = backend.adapter_sets()
    adapters = [new_adapter(name, "/adapters/x", "test", 1000.0) for name in names]
    await sets.report(MODEL, "a", AdapterReport({each.adapter_id: ONE for each in adapters}))
    by = [control(backend, engines, Clock()) for _ in adapters]

    await asyncio.gather(
        *(
            each.load(MODEL, adapter, replaces=False, patience=60)
            for each, adapter in zip(by, adapters, strict=True)
        )
    )

    assert sorted((await sets.read(MODEL)).ready()) == names


async def test_a_set_is_replaced_only_where_it_is_the_one_that_was_read(backend: Backend) -> None:
    sets = backend.adapter_sets()
    new = AdapterSet().added(new_adapter("sql", "/adapters/sql", "test", 1.0))
    other = AdapterSet().added(new_adapter("tone", "/adapters/tone", "test", 1.0))

    assert await sets.replace(MODEL, AdapterSet(), new)
    assert await sets.replace(MODEL, AdapterSet(), new), "a repetition"
    assert not await sets.replace(MODEL, AdapterSet(), other)
    assert await sets.read(MODEL) == new


def test_names_paths_and_numbers_of_adapters_are_bounded() -> None:
    known = AdapterSet()
    for name, path in (("", "/a"), ("a\n", "/a"), ("a" * 257, "/a"), ("a", ""), ("a", "/a\0")):
        with pytest.raises(AdapterError, match="printable characters"):
            known.added(new_adapter(name, path, "test", 1.0))
    for number in range(MOST_SERVED):
        known = known.added(new_adapter(f"a{number}", "/a", "test", 1.0))
    with pytest.raises(AdapterError, match="may have 128: unload one"):
        known.added(new_adapter("more", "/a", "test", 1.0))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\x91\x01", b"\x91\x91\x01"])
def test_broken_sets_and_reports_are_refused(data: bytes) -> None:
    with pytest.raises(AdapterError):
        decode_set("v", data)
    with pytest.raises(AdapterError):
        decode_report(data)


def test_a_set_with_fields_of_a_later_version_is_read() -> None:
    known = AdapterSet().added(new_adapter("sql", "/adapters/sql", "test", 1.0))
    data = encode_set(known)
    longer = b"\x91" + bytes([data[1] + 1]) + data[2:] + b"\xa5later"

    assert decode_set(known.version, longer) == known
