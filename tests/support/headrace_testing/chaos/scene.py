"""One fault under load: a crowd of clients, the fault at a random moment, and what went wrong."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import httpx

from headrace_testing.processes import until

from .cases import Case, Workload
from .clients import Client, ClientKind, problem
from .world import World

T = TypeVar("T")
Act = Callable[["Scene"], Awaitable[None]]

# The largest share of tokens after which a fault may begin; later, the streams might end before it
# acts.
_LATEST = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault. `servers` is the kind of Redis. With `survives` the crowd includes clients that
    cannot reconnect. `slow` faults take too long for every run of the tests. `ready` runs before
    the clients arrive. `crowd` is the number of clients for each case. With `lasting` a client that
    has its answer asks again until the fault is over. With `spoils` the world is not used again.
    With `loses` Redis loses data, and perhaps a part of the ledger."""

    name: str
    title: str
    act: Act
    servers: str = "valkey"
    survives: bool = True
    slow: bool = False
    ready: Callable[[World], None] | None = None
    crowd: int = 1
    lasting: bool = False
    spoils: bool = False
    loses: bool = False


class Scene:
    """The processes and files of a fault; everything random follows from the seed."""

    def __init__(self, world: World, workload: Workload, seed: int) -> None:
        self.world = world
        self.workload = workload
        self.seed = seed
        self.random = random.Random(seed)
        self.mistakes: list[str] = []
        self._tokens = 0
        self._moved = asyncio.Event()
        self._ended = False

    async def play(self, fault: Fault) -> None:
        """Runs the crowd while the fault acts; afterwards `mistakes` lists what went wrong."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits) as self.http:
            cases = self.workload.cases * fault.crowd
            kinds = self._client_kinds(fault.survives, len(cases))
            self.clients = [self.client(*each) for each in zip(cases, kinds, strict=True)]
            act = asyncio.ensure_future(fault.act(self))
            over = act.done if fault.lasting else lambda: True
            await asyncio.gather(*(self._visit(client, over) for client in list(self.clients)))
            self._ended = True
            self._moved.set()
            await act
        self.check(self.clients)

    async def _visit(self, client: Client, over: Callable[[], bool]) -> None:
        """Runs a client, and more like it until the fault is over."""
        await client.run()
        while not over():
            again = self.client(client.case, client.kind)
            self.clients.append(again)
            await again.run()

    def check(self, clients: Sequence[Client]) -> None:
        """Notes every answer that differs from the expected one."""
        for client in clients:
            if wrong := problem(client.case, client.answer):
                self.mistakes.append(f"{client.case.name} at {client.case.prompt[:3]}...: {wrong}")

    def wrong_usage(self) -> list[str]:
        """What the ledger has of the crowd's requests instead of what they were given."""
        entered = self.world.entered()
        return [
            f"{client.case.name} {client.answer.request_id}: entered {found}, given {given}"
            for client in self.clients
            if client.answer.done and client.answer.error is None
            for given in [(len(client.case.prompt), client.answer.completion_tokens)]
            if (found := entered.get(client.answer.request_id)) != given
        ]

    def client(self, case: Case, kind: ClientKind) -> Client:
        urls = list(self.world.urls)
        self.random.shuffle(urls)
        return Client(self.http, urls, case, kind, self._seen)

    def _client_kinds(self, survives: bool, count: int) -> list[ClientKind]:
        """Chooses so that three successive seeds try each case in all three ways."""
        kinds = list(ClientKind) if survives else [ClientKind.RESUMABLE, ClientKind.WHOLE]
        return [kinds[(n + self.seed) % len(kinds)] for n in range(count)]

    def _seen(self, tokens: int) -> None:
        self._tokens += tokens
        self._moved.set()

    @property
    def ended(self) -> bool:
        """Whether all of the crowd have their answers."""
        return self._ended

    async def visit_again(self) -> None:
        """Runs every case once more, and notes wrong answers."""
        more = [self.client(client.case, client.kind) for client in self.clients]
        await asyncio.gather(*(client.run() for client in more))
        self.check(more)

    async def moment(self, earliest: float = 0.0, latest: float = _LATEST) -> None:
        """Waits until the crowd has a random share of its tokens."""
        mark = self.random.uniform(earliest, latest) * self.workload.tokens
        while self._tokens < mark and not self._ended:
            self._moved.clear()
            await self._moved.wait()

    async def until_ended(self) -> None:
        """Waits until every client has its answer."""
        while not self._ended:
            self._moved.clear()
            await self._moved.wait()

    async def pause(self, seconds: float) -> None:
        """Waits while a fault lasts."""
        await asyncio.sleep(seconds)

    async def aside(self, function: Callable[[], T]) -> T:
        """Runs a blocking function in a thread while the clients continue."""
        return await asyncio.to_thread(function)

    def expect(self, truth: bool, otherwise: str) -> None:
        if not truth:
            self.mistakes.append(otherwise)


def run(fault: Fault, world: World, workload: Workload, seed: int) -> list[str]:
    """Runs a fault; returns a line for each thing that went wrong."""
    world.restore()
    if fault.ready is not None:
        fault.ready(world)
    scene = Scene(world, workload, seed)
    asyncio.run(scene.play(fault))
    try:
        world.until_clean()
        if world.is_one_server and not fault.loses:
            until(lambda: not scene.wrong_usage(), "the ledger to have what clients were given")
    except AssertionError as error:
        scene.mistakes += [str(error), *scene.wrong_usage()]
    return scene.mistakes
