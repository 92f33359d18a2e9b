"""Engines and gateways that die, freeze, hang, raise, drain, come and go."""

import asyncio
import signal
from functools import partial

import psutil

from headrace_common.config.process import EXIT_FAILED
from headrace_testing.processes import until
from headrace_testing.stack import EngineProcess

from .demands import HANG, RAISE
from .scene import Fault, Scene
from .world import GATEWAY_FLAGS, World

_LEASES_S = 2.0
_CHILDREN_S = 30.0
_WAYS = ("in time", "no time", "twice", "killed")


def busiest(world: World) -> EngineProcess:
    """The engine with the most running sequences."""
    alive = [engine for engine in world.engines if engine.alive]
    return max(alive, key=lambda e: e.metric("headrace_engine_requests", 'state="running"'))


async def kill_engines(scene: Scene) -> None:
    """Kills one engine or all, at any moment from the first request to the last frames."""
    await scene.moment(latest=0.95)
    victims = list(scene.world.engines)
    if scene.random.random() < 0.5:
        victims = [await scene.aside(partial(busiest, scene.world))]
    for victim in victims:
        victim.kill()
    await scene.aside(scene.world.spawn)


def one_frozen(world: World) -> None:
    """Freezes one engine: requests placed with it wait, and the other engine takes them."""
    world.engines[0].signal(signal.SIGSTOP)


async def kill_frozen_engine(scene: Scene) -> None:
    """Kills a frozen engine while clients arrive, or after all have begun.

    Its statuses last as long as a lease.
    """
    frozen = scene.world.engines[0]
    await scene.moment(latest=0.3)
    frozen.kill()
    await scene.aside(scene.world.spawn)


async def freeze_engine(scene: Scene) -> None:
    """Freezes an engine beyond its lease.

    It wakes while others continue its requests, or afterwards.
    """
    await scene.moment()
    frozen = await scene.aside(partial(busiest, scene.world))
    frozen.signal(signal.SIGSTOP)
    if scene.random.random() < 0.5:
        await scene.until_ended()
    else:
        await scene.pause(scene.random.uniform(1.0, 1.5) * _LEASES_S)
    frozen.signal(signal.SIGCONT)
    await scene.until_ended()
    await scene.aside(lambda: until(lambda: frozen.idle, "the woken engine to drop its work"))
    scene.expect(frozen.alive, "the woken engine is dead")


def watched_alone(world: World) -> None:
    """Runs one engine with a short watchdog limit; other engines would be taken for hung on a slow
    machine."""
    for engine in list(world.engines):
        world.retire(engine)
    world.spawn("--step-timeout", "1")
    world.await_engines(1)


async def hang_step(scene: Scene) -> None:
    await scene.moment(latest=0.5)
    (engine,) = scene.world.engines
    engine.signal(HANG)
    await scene.aside(scene.world.spawn)
    await _must_fail(scene, engine)


async def raise_in_step(scene: Scene) -> None:
    await scene.moment(latest=0.5)
    engine = await scene.aside(partial(busiest, scene.world))
    engine.signal(RAISE)
    await _must_fail(scene, engine)


async def _must_fail(scene: Scene, engine: EngineProcess) -> None:
    """Checks that the engine ends with the right exit code and leaves no child process."""
    children = psutil.Process(engine.pid).children(recursive=True)
    await scene.until_ended()
    while engine.alive:  # the clients may have ended before the engine meets its fault
        await scene.visit_again()
    code = await scene.aside(engine.wait)
    scene.expect(code == EXIT_FAILED, f"the engine ended with {code}")
    # Servers of processes end by themselves when they notice that the engine has ended.
    _, left = await scene.aside(partial(psutil.wait_procs, children, timeout=_CHILDREN_S))
    scene.expect(left == [], "it left a child")


async def drain_engine(scene: Scene) -> None:
    """Drains an engine in two of four ways: SIGTERM with time and without, a second SIGTERM, a
    grace period that is too short. Two successive seeds cover all four."""
    ways = [_WAYS[(2 * scene.seed + number) % len(_WAYS)] for number in range(2)]
    drained = [
        await scene.aside(
            partial(scene.world.spawn, "--drain-timeout", "0" if way == "no time" else "30")
        )
        for way in ways
    ]
    await scene.aside(lambda: scene.world.await_engines(4))
    await asyncio.gather(*map(partial(_drain, scene), ways, drained))


async def _drain(scene: Scene, way: str, engine: EngineProcess) -> None:
    await scene.moment()
    engine.signal(signal.SIGTERM)
    if way == "twice":
        engine.signal(signal.SIGTERM)
    if way == "killed":
        await scene.pause(scene.random.uniform(0, 0.1))
        engine.kill()
        return
    code = await scene.aside(engine.wait)
    scene.expect(code == 0, f"the drained engine ended with {code} ({way})")


async def kill_gateway(scene: Scene) -> None:
    """Kills a gateway.

    Clients continue elsewhere, or, if the seed is odd, at the same address once it is back.
    """
    await scene.moment()
    victim = scene.random.choice(scene.world.gateways)
    victim.kill()
    if scene.seed % 2:
        await scene.aside(lambda: scene.world.add_gateway(*GATEWAY_FLAGS, port=victim.port))


async def kill_gateway_and_engine(scene: Scene) -> None:
    """Kills a gateway, and then the engine before it can tell the new gateway what that has
    missed."""
    await scene.moment()
    engine = await scene.aside(partial(busiest, scene.world))
    scene.random.choice(scene.world.gateways).kill()
    await scene.pause(scene.random.uniform(0, 0.3))
    engine.kill()


async def kill_engine_of_frozen_gateway(scene: Scene) -> None:
    """Kills the engine of a frozen gateway, which wakes up to another engine's tokens."""
    await scene.moment()
    gateway = scene.random.choice(scene.world.gateways)
    engine = await scene.aside(partial(busiest, scene.world))
    gateway.signal(signal.SIGSTOP)
    engine.kill()
    await scene.pause(scene.random.uniform(0.2, 1.5) * _LEASES_S)
    gateway.signal(signal.SIGCONT)


async def freeze_gateway(scene: Scene) -> None:
    """Freezes a gateway for longer than an engine's silence may last: it wakes and continues where
    it was."""
    await scene.moment()
    gateway = scene.random.choice(scene.world.gateways)
    gateway.signal(signal.SIGSTOP)
    await scene.pause(scene.random.uniform(1.4, 2.0) * _LEASES_S)
    gateway.signal(signal.SIGCONT)


PROCESS_FAULTS = (
    Fault(name="F1", title="engines killed", act=kill_engines),
    Fault(name="F2", title="engine frozen beyond its lease, wakes", act=freeze_engine, slow=True),
    Fault(
        name="F34",
        title="engine killed that requests are placed with",
        act=kill_frozen_engine,
        slow=True,
        ready=one_frozen,
    ),
    Fault(name="F3", title="engine's step hangs", act=hang_step, ready=watched_alone, slow=True),
    Fault(name="F4", title="engine's step raises", act=raise_in_step, slow=True),
    Fault(name="F5", title="engine drained, in time or not", act=drain_engine, slow=True),
    Fault(name="F7", title="gateway killed", act=kill_gateway, survives=False),
    Fault(
        name="F8",
        title="gateway and its engine killed",
        act=kill_gateway_and_engine,
        survives=False,
    ),
    Fault(
        name="F9",
        title="engine killed while its gateway is frozen",
        act=kill_engine_of_frozen_gateway,
        slow=True,
    ),
    Fault(name="F9-alone", title="gateway frozen, wakes", act=freeze_gateway, slow=True),
)
