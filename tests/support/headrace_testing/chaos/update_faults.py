"""Engines and gateways that are replaced while clients stream: scaling, and rolling updates."""

import signal
from functools import partial

from headrace_testing.stack import EngineProcess

from .demands import NEWER_PROTOCOL
from .scene import Fault, Scene
from .world import ENGINES, GATEWAY_FLAGS, GATEWAYS, SHARDS, World

_NEWER = {NEWER_PROTOCOL: "1"}


async def scale(scene: Scene) -> None:
    """Scales from two engines to four, to one and to four again."""
    await scene.moment(latest=0.2)
    for _ in range(2):
        await scene.aside(partial(scene.world.spawn, "--drain-timeout", "0"))
    await scene.aside(lambda: scene.world.await_engines(4))
    await scene.moment(earliest=0.2, latest=0.6)
    leaving = scene.random.sample(scene.world.engines, 3)
    for engine in leaving:
        engine.signal(signal.SIGTERM)
    await scene.moment(earliest=0.5, latest=0.8)
    for _ in range(3):
        await scene.aside(scene.world.spawn)
    for engine in leaving:
        code = await scene.aside(engine.wait)
        scene.expect(code == 0, f"an engine that left ended with {code}")


def first_of_the_next_version(world: World) -> None:
    """Starts a gateway and an engine of the next version, so that both versions serve side by
    side."""
    world.spawn(env=_NEWER)
    world.add_gateway(*GATEWAY_FLAGS, env=_NEWER)
    world.await_engines(ENGINES + 1)


async def update(scene: Scene) -> None:
    """Replaces all others, engines first, then gateways."""
    world = scene.world
    known = await scene.aside(world.dead_letters)
    await scene.moment(latest=0.5)
    for engine in world.engines[:ENGINES]:
        engine.signal(signal.SIGTERM)
        await scene.aside(partial(world.spawn, env=_NEWER))
        code = await scene.aside(engine.wait)
        scene.expect(code == 0, f"the older engine ended with {code}")
    for gateway in world.gateways[:GATEWAYS]:
        gateway.signal(signal.SIGTERM)
        code = await scene.aside(gateway.wait)
        scene.expect(code == 0, f"the older gateway ended with {code}")
        await scene.aside(partial(world.add_gateway, *GATEWAY_FLAGS, port=gateway.port, env=_NEWER))
    world.engines[:] = world.engines[ENGINES:]
    world.gateways[:] = world.gateways[GATEWAYS:]
    await scene.aside(lambda: world.await_engines(ENGINES + 1))
    await scene.until_ended()
    await scene.visit_again()
    letters = await scene.aside(world.dead_letters) - known
    scene.expect(letters == 0, f"{letters} dead letters")


async def reshard(scene: Scene) -> None:
    """Replaces all engines twice, one after the other, by engines with another number of shards."""
    world = scene.world
    number, world.queue_shards = world.queue_shards, SHARDS  # every shard is checked afterwards
    for _ in range(2):
        await scene.moment(latest=0.6)
        number = scene.random.choice([n for n in range(1, SHARDS + 1) if n != number])
        for engine in list(world.engines):
            await _replace(scene, engine, number)


async def _replace(scene: Scene, engine: EngineProcess, shards: int) -> None:
    """Starts another process before or after the old one is gone; the old one drains or is
    killed."""
    drains = scene.random.random() < 0.5

    def spawn() -> None:
        scene.world.spawn("--queue-shards", str(shards))

    def leave() -> None:
        if drains:
            engine.await_log("engine ready")  # earlier, the signal would have no handler
            engine.signal(signal.SIGTERM)
            code = engine.wait()
            scene.expect(code == 0, f"an engine that left ended with {code}")
        scene.world.retire(engine)

    for step in scene.random.sample((spawn, leave), 2):
        await scene.aside(step)


UPDATE_FAULTS = (
    Fault(
        name="F26",
        title="rolling update to a newer protocol",
        act=update,
        ready=first_of_the_next_version,
        slow=True,
        spoils=True,
    ),
    Fault(name="F27", title="engines come and go", act=scale, slow=True),
    Fault(
        name="F35",
        title="the queue gets more shards, and fewer",
        act=reshard,
        slow=True,
        spoils=True,
    ),
)
