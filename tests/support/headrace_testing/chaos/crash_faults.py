"""Engines that crash at each of the Moments in a request's life."""

from functools import partial

from headrace_testing.stack import EngineProcess

from .demands import Moment
from .scene import Fault, Scene

_EARLY = (Moment.TAKEN, Moment.EXECUTING, Moment.PREFILL)


async def crash(moment: Moment, scene: Scene) -> None:
    """Crashes all engines, or one of them if the seed is odd. Each is replaced when it is dead."""
    if moment not in _EARLY:
        await scene.moment(latest=0.5)
    victims = list(scene.world.engines)
    if scene.seed % 2:
        victims = [scene.random.choice(victims)]
    for victim in victims:
        victim.signal(moment.signal)
    for victim in victims:
        await _died(scene, victim)
        await scene.aside(scene.world.spawn)


async def _died(scene: Scene, engine: EngineProcess) -> None:
    """Waits for the engine's end.

    If all clients end before the engine reaches the moment, runs them again.
    """
    while engine.alive:
        if scene.ended:
            await scene.visit_again()
        else:
            await scene.pause(0.02)


async def crash_taking_over(scene: Scene) -> None:
    """The engine that takes over a dead engine's requests dies too, before it makes a token."""
    await scene.moment(latest=0.5)
    first, *others = scene.world.engines
    for engine in others:
        engine.signal(Moment.RESUMED.signal)
    first.kill()
    while any(engine.alive for engine in others) and not scene.ended:
        await scene.pause(0.02)
    for engine in others:
        scene.world.retire(engine)
    for _ in others:
        await scene.aside(scene.world.spawn)


CRASH_FAULTS = (
    *(
        Fault(
            name=f"F1-{moment.name.lower().replace('_', '-')}",
            title=f"engines killed: {moment.value}",
            act=partial(crash, moment),
            slow=True,
        )
        for moment in Moment
        if moment is not Moment.RESUMED
    ),
    Fault(
        name="F1-resumed",
        title=f"engines killed: {Moment.RESUMED.value}",
        act=crash_taking_over,
        slow=True,
    ),
)
