"""Redis that crashes, loses data, fills up, fails over, or is hard to reach."""

import asyncio
from functools import partial

import redis

from headrace_testing.processes import until
from headrace_testing.redis_sets import ask

from .proxy import FAIR, Weather
from .scene import Fault, Scene


async def restart(scene: Scene) -> None:
    """Kills the server, which comes back with its append-only file, one to three times."""
    for _ in range(scene.random.randint(1, 3)):
        await scene.moment()
        await scene.aside(scene.world.valkey.restart)
        await scene.pause(scene.random.uniform(0, 0.3))


async def restart_often(scene: Scene) -> None:
    """Restarts the server ten times in about 30 s."""
    for _ in range(10):
        await scene.pause(scene.random.uniform(1, 5))
        await scene.aside(scene.world.valkey.restart)


async def roll_back(scene: Scene) -> None:
    """Restarts the server with data that is up to a second old, as after a failover to a late
    replica."""
    await scene.moment(latest=0.5)
    snapshot = scene.world.folder / f"snapshot-{scene.random.getrandbits(64):x}"
    await scene.aside(partial(scene.world.valkey.snapshot, snapshot))
    await scene.pause(scene.random.uniform(0.1, 1.0))
    await scene.aside(partial(scene.world.valkey.roll_back, snapshot))


async def empty(scene: Scene) -> None:
    """Redis is emptied. Its clients' requests continue; requests with unknown ids get an error."""
    await scene.moment()
    await scene.aside(lambda: ask(scene.world.valkey.port, "FLUSHALL"))
    unknown = f"{scene.random.getrandbits(128):032x}"
    for url in scene.world.urls:
        answer = await scene.http.get(f"{url}/v1/requests/{unknown}")
        result = (answer.status_code, answer.json()["error"]["code"])
        scene.expect(result == (404, "request_not_found"), f"an unknown id was answered {result}")


async def fill(scene: Scene) -> None:
    """Redis has no memory for a while: new requests are refused, running ones are finished."""
    await scene.moment(latest=0.4)
    port = scene.world.valkey.port
    await scene.aside(lambda: ask(port, "CONFIG", "SET", "maxmemory", 1))
    late = [scene.client(client.case, client.kind) for client in scene.clients[:4]]
    answers = [asyncio.ensure_future(client.run()) for client in late]
    refused = partial(until, lambda: all(c.answer.refused for c in late), "clients to be refused")
    await scene.aside(refused)
    await scene.aside(lambda: ask(port, "CONFIG", "SET", "maxmemory", 0))
    await asyncio.gather(*answers)
    scene.check(late)


async def fail_over(scene: Scene) -> None:
    """The master dies, Sentinel promotes its replica."""
    await scene.moment()
    await scene.aside(scene.world.sentinel_set.master.kill)
    await scene.aside(scene.world.sentinel_set.until_promoted)


async def fail_over_late(scene: Scene) -> None:
    """Fails over to a replica that misses the last writes."""
    await scene.moment()
    servers = scene.world.sentinel_set
    await scene.aside(servers.cut_replica_off)
    await scene.pause(scene.random.uniform(0.05, 1.0))
    await scene.aside(servers.master.kill)
    servers.replica.unpause()
    await scene.aside(servers.until_promoted)


async def split_brain(scene: Scene) -> None:
    """The master freezes, its replica is promoted, and it wakes as a second master. Gateways and
    engines use one or the other, until Sentinel demotes it some 10 s later."""
    await scene.moment()
    servers = scene.world.sentinel_set
    servers.master.pause()
    await scene.aside(servers.until_promoted)
    servers.master.unpause()
    await scene.aside(partial(until, partial(_refuses_writes, servers.master.port), "a demotion"))


async def split_brain_guarded(scene: Scene) -> None:
    """The same with masters that need a replica to write, as docs/protocol.md recommends: the old
    master accepts no writes when it wakes, and gateways and engines connected to it wait."""
    await split_brain(scene)
    await scene.pause(5.0)


def _refuses_writes(port: int) -> bool:
    try:
        ask(port, "SET", "chaos-probe", 1)
    except redis.ResponseError as error:
        return str(error).startswith(("NOREPLICAS", "READONLY", "You can't write"))
    return False


async def lose_shard(scene: Scene) -> None:
    """Kills a cluster's master that has a shard of the model's queue; its replica takes over."""
    await scene.moment()
    nodes, shard = scene.world.cluster_set, scene.random.choice(scene.world.shard_keys)
    slot = ask(nodes.masters[1].port, "CLUSTER", "KEYSLOT", shard.stats)
    owner = nodes.owner(slot)
    await scene.aside(owner.kill)


async def latency(scene: Scene) -> None:
    """Delays each piece by up to 200 ms, with jitter."""
    await scene.moment(latest=0.3)
    delay = scene.random.uniform(0.02, 0.1)
    scene.world.proxy.change(Weather(delay=delay, jitter=delay))
    await scene.pause(3.0)
    scene.world.proxy.change(FAIR)


async def slices(scene: Scene) -> None:
    """Sends one to three bytes at a time."""
    await scene.moment(latest=0.3)
    scene.world.proxy.change(Weather(slice=scene.random.randint(1, 3)))
    await scene.pause(1.0)
    scene.world.proxy.change(FAIR)


async def cuts(scene: Scene) -> None:
    """Cuts every connection, again and again."""
    for _ in range(scene.random.randint(2, 5)):
        await scene.moment()
        scene.world.proxy.cut()
        await scene.pause(scene.random.uniform(0, 0.5))


async def black_hole(scene: Scene) -> None:
    """Lets connections stay open while nothing comes through, for 1 to 3 s: shorter than
    timeouts."""
    await _silence(scene, scene.random.uniform(1, 3))


async def long_black_hole(scene: Scene) -> None:
    """The same for longer than the timeouts of commands and reads."""
    await _silence(scene, 18.0)


async def half_open(scene: Scene) -> None:
    """Drops all packets of all connections from now on, without closing them."""
    await scene.moment()
    scene.world.proxy.strand()


async def _silence(scene: Scene, seconds: float) -> None:
    await scene.moment()
    scene.world.proxy.change(Weather(silent=True))
    await scene.pause(seconds)
    scene.world.proxy.change(FAIR)


REDIS_FAULTS = (
    Fault(name="F10", title="Redis killed and restarted", act=restart),
    Fault(
        name="F10-often",
        title="Redis killed and restarted ten times",
        act=restart_often,
        slow=True,
        lasting=True,
    ),
    Fault(name="F11", title="Redis comes back with older data", act=roll_back, loses=True),
    Fault(name="F12", title="Redis emptied", act=empty, loses=True),
    Fault(name="F13", title="Sentinel failover", act=fail_over, servers="sentinel"),
    Fault(
        name="F13-late",
        title="Sentinel failover to a late replica",
        act=fail_over_late,
        servers="sentinel",
        slow=True,
    ),
    Fault(
        name="F14",
        title="two masters for a while",
        act=split_brain,
        servers="sentinel",
        slow=True,
        lasting=True,
    ),
    Fault(
        name="F14-guarded",
        title="two masters, the former one refuses writes",
        act=split_brain_guarded,
        servers="guarded",
        slow=True,
        lasting=True,
    ),
    Fault(name="F13-cluster", title="master of a cluster lost", act=lose_shard, servers="cluster"),
    Fault(name="F17", title="Redis is slow", act=latency, servers="proxied"),
    Fault(name="F17-slices", title="Redis' bytes come one by one", act=slices, servers="proxied"),
    Fault(name="F17-cuts", title="connections to Redis cut", act=cuts, servers="proxied"),
    Fault(name="F17-silence", title="Redis is silent", act=black_hole, servers="proxied"),
    Fault(
        name="F17-long",
        title="Redis is silent for longer than all timeouts",
        act=long_black_hole,
        servers="proxied",
        slow=True,
    ),
    Fault(
        name="F17-half-open",
        title="connections to Redis lead nowhere",
        act=half_open,
        servers="proxied",
        slow=True,
    ),
    Fault(name="F18", title="Redis out of memory", act=fill),
)
