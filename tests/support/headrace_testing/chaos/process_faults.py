"""Engines and gateways that die, freeze, hang, raise, drain, come and go."""

import asyncio
import signal
from functools import partial

import psutil

from headrace_common.process import EXIT_FAILED
from headrace_testing.processes import until
from headrace_testing.stack import EngineProcess

from .demands import HANG, RAISE
from .scene import Fault, Scene
from .world import GATEWAY_FLAGS, World

_LEASES_S = 2.0


def busiest(world: World) -> EngineProcess:
    """The engine that runs most sequences."""
    alive = [engine for engine in world.engines if engine.alive]
    return max(alive, key=lambda e: e.metric("headrace_engine_requests", 'state="running"'))


async def kill_engines(scene: Scene) -> None:
    """One or all, at any moment from the first request to the last frames."""
    await scene.moment(latest=0.95)
    victims = list(scene.world.engines)
    if scene.random.random() < 0.5:
        victims = [await scene.aside(partial(busiest, scene.world))]
    for victim in victims:
        victim.kill()
    await scene.aside(scene.world.spawn)


def one_frozen(world: World) -> None:
    """What is placed with it waits, and is taken by the other."""
    world.engines[0].signal(signal.SIGSTOP)


async def kill_frozen_engine(scene: Scene) -> None:
    """While clients come, or when all have begun; its statuses last as long as a lease."""
    frozen = scene.world.engines[0]
    await scene.moment(latest=0.3)
    frozen.kill()
    await scene.aside(scene.world.spawn)


async def freeze_engine(scene: Scene) -> None:
    """Beyond its lease; it wakes while others go on with its requests, or after they have."""
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
    """One engine, whose watchdog is quick; the others' would take a slow machine for a hang."""
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
    """The engine must end with the exit code that says so, and leave no child."""
    children = psutil.Process(engine.pid).children(recursive=True)
    await scene.until_ended()
    await _keep_busy(scene, engine)
    code = await scene.aside(engine.wait)
    scene.expect(code == EXIT_FAILED, f"the engine ended with {code}")
    scene.expect(not any(map(psutil.Process.is_running, children)), "it left a child")


async def _keep_busy(scene: Scene, engine: EngineProcess) -> None:
    """More requests until the engine has met its fault: the crowd may have ended before it did."""
    while engine.alive:
        more = [scene.client(client.case, client.manner) for client in scene.clients[:4]]
        await asyncio.gather(*(client.run() for client in more))
        scene.check(more)


async def drain_engine(scene: Scene) -> None:
    """SIGTERM with time and without; a second SIGTERM; a grace that is too short."""
    how = scene.random.choice(["in time", "no time", "twice", "killed"])
    drained = await scene.aside(
        lambda: scene.world.spawn("--drain-timeout", "0" if how == "no time" else "30")
    )
    await scene.aside(lambda: scene.world.await_engines(3))
    await scene.moment()
    drained.signal(signal.SIGTERM)
    if how == "twice":
        drained.signal(signal.SIGTERM)
    if how == "killed":
        await scene.pause(scene.random.uniform(0, 0.1))
        drained.kill()
        return
    code = await scene.aside(drained.wait)
    scene.expect(code == 0, f"the drained engine ended with {code} ({how})")


async def kill_gateway(scene: Scene) -> None:
    """Clients go on elsewhere, or at the same address once it is back."""
    await scene.moment()
    victim = scene.random.choice(scene.world.gateways)
    victim.kill()
    if scene.random.random() < 0.5:
        await scene.aside(lambda: scene.world.add_gateway(*GATEWAY_FLAGS, port=victim.port))


async def kill_gateway_and_engine(scene: Scene) -> None:
    """The engine before it can say what its new gateway has missed."""
    await scene.moment()
    engine = await scene.aside(partial(busiest, scene.world))
    scene.random.choice(scene.world.gateways).kill()
    await scene.pause(scene.random.uniform(0, 0.3))
    engine.kill()


async def kill_engine_of_frozen_gateway(scene: Scene) -> None:
    """The gateway wakes up to another engine's tokens."""
    await scene.moment()
    gateway = scene.random.choice(scene.world.gateways)
    engine = await scene.aside(partial(busiest, scene.world))
    gateway.signal(signal.SIGSTOP)
    engine.kill()
    await scene.pause(scene.random.uniform(0.2, 1.5) * _LEASES_S)
    gateway.signal(signal.SIGCONT)


async def scale(scene: Scene) -> None:
    """From two engines to four, to one, to two."""
    await scene.moment(latest=0.2)
    for _ in range(2):
        await scene.aside(partial(scene.world.spawn, "--drain-timeout", "0"))
    await scene.aside(lambda: scene.world.await_engines(4))
    await scene.moment(earliest=0.2, latest=0.6)
    leaving = scene.random.sample(scene.world.engines, 3)
    for engine in leaving:
        engine.signal(signal.SIGTERM)
    await scene.aside(scene.world.spawn)
    for engine in leaving:
        code = await scene.aside(engine.wait)
        scene.expect(code == 0, f"an engine that left ended with {code}")


PROCESS_FAULTS = (
    Fault(name="F1", title="engines killed", act=kill_engines),
    Fault(name="F2", title="engine frozen beyond its lease, wakes", act=freeze_engine),
    Fault(
        name="F34",
        title="engine killed that requests are placed with",
        act=kill_frozen_engine,
        slow=True,
        ready=one_frozen,
    ),
    Fault(name="F3", title="engine's step hangs", act=hang_step, ready=watched_alone),
    Fault(name="F4", title="engine's step raises", act=raise_in_step),
    Fault(name="F5", title="engine drained, in time or not", act=drain_engine),
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
    ),
    Fault(name="F27", title="engines come and go", act=scale),
)
