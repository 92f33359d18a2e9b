"""Requests that kill engines, clients that cancel, deadlines that pass."""

import asyncio
import signal
from dataclasses import replace
from functools import partial

import httpx

from headrace_gateway.queue_client.deadlines import TIMEOUT_HEADER

from .clients import Client, ClientKind
from .demands import POISON
from .scene import Fault, Scene
from .world import World

_VISITORS = 8
_TIMEOUT_S = 0.7
_LONG_LEASE = ("--lease", "10")


async def poison(scene: Scene, *flags: str) -> None:
    """A request that kills the engines that run it becomes a dead letter; others finish."""
    known = await scene.aside(scene.world.dead_letters)
    await scene.moment(latest=0.5)
    case = scene.random.choice(scene.workload.cases)
    poisonous = replace(case, prompt=(*case.prompt[:5], POISON), fields={})
    victim = scene.client(poisonous, ClientKind.PLAIN)
    ending = asyncio.ensure_future(victim.run())
    while not ending.done():
        dead = [engine for engine in scene.world.engines if not engine.alive]
        for engine in dead:
            scene.world.engines.remove(engine)
            await scene.aside(partial(scene.world.spawn, *flags))
        await asyncio.wait({ending}, timeout=0.05)
    error = victim.answer.error or ""
    scene.expect("request_failed" in error, f"poison was answered {error or 'as if it were none'}")
    letters = await scene.aside(scene.world.dead_letters) - known
    scene.expect(letters == 1, f"{letters} dead letters")


async def poison_in_a_crowd(scene: Scene) -> None:
    """A poisonous request among many others, so that heartbeats are late.

    Leases must not expire.
    """
    await poison(scene, *_LONG_LEASE)


def four_engines(world: World) -> None:
    for engine in list(world.engines):
        world.retire(engine)
    for _ in range(4):
        world.spawn(*_LONG_LEASE)
    world.await_engines(4)


async def cancel(scene: Scene) -> None:
    """Clients disconnect at any time; background requests are cancelled twice."""
    await scene.moment(latest=0.3)
    visits = [
        asyncio.ensure_future(
            scene.client(case, scene.random.choice([ClientKind.PLAIN, ClientKind.WHOLE])).run()
        )
        for case in scene.random.choices(scene.workload.cases, k=_VISITORS)
    ]
    background = [await _begin(scene) for _ in range(_VISITORS // 2)]
    for visit in visits:
        await scene.pause(scene.random.uniform(0, 0.05))
        visit.cancel()
    for url in background:
        await scene.pause(scene.random.uniform(0, 0.1))
        states = [(await scene.http.delete(url)).json()["status"] for _ in range(2)]
        states.append((await scene.http.get(url)).json()["status"])
        final = {"cancelled", "completed"}
        scene.expect(len(set(states)) == 1 and set(states) < final, f"cancelled twice: {states}")
    await asyncio.gather(*visits, return_exceptions=True)


async def _begin(scene: Scene) -> str:
    """Starts a background request and returns its URL."""
    url = scene.random.choice(scene.world.urls)
    body = {**scene.random.choice(scene.workload.cases).body, "background": True}
    answer = await scene.http.post(f"{url}/v1/completions", json=body)
    assert answer.status_code == 202, answer.text
    return url + answer.headers["location"]


async def deadlines(scene: Scene) -> None:
    """Engines freeze for longer than some requests' timeouts; these fail and are never run."""
    await scene.moment(latest=0.6)
    for engine in scene.world.engines:
        engine.signal(signal.SIGSTOP)
    asking = [
        asyncio.ensure_future(_ask_with_timeout(scene, client))
        for client in scene.clients[:_VISITORS]
    ]
    answers = await asyncio.gather(*asking)
    for engine in scene.world.engines:
        engine.signal(signal.SIGCONT)
    for answer in answers:
        code = answer.json()["error"]["code"]
        result = (answer.status_code, code)
        scene.expect(result == (504, "deadline_exceeded"), f"a late request was answered {result}")


async def _ask_with_timeout(scene: Scene, client: Client) -> httpx.Response:
    url = scene.random.choice(scene.world.urls)
    headers = {TIMEOUT_HEADER: f"{scene.random.uniform(0.5, 1) * _TIMEOUT_S:.3f}"}
    return await scene.http.post(f"{url}/v1/completions", json=client.case.body, headers=headers)


CLIENT_FAULTS = (
    Fault(name="F6", title="a request that kills engines", act=poison, slow=True),
    Fault(
        name="F6-crowd",
        title="a request that kills engines, among 256 others on four engines",
        act=poison_in_a_crowd,
        ready=four_engines,
        crowd=16,
        slow=True,
        spoils=True,
    ),
    Fault(name="F21", title="clients cancel", act=cancel),
    Fault(name="F22", title="deadlines pass", act=deadlines),
)
