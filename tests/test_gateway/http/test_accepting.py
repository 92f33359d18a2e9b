"""The server accepts several connections in one turn of the event loop."""

import asyncio
import socket
from pathlib import Path

import uvloop

from headrace_gateway.http.server import ACCEPTED_A_TURN
from headrace_testing.gateway import serve

CONNECTIONS = 4 * ACCEPTED_A_TURN


def test_connections_that_come_together_are_accepted_in_few_turns(checkpoint: Path) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(_turns(checkpoint)) < CONNECTIONS / 2


async def _turns(checkpoint: Path) -> int:
    """Returns the turns in which the server accepts connections that all wait."""
    async with serve(checkpoint) as gateway, asyncio.timeout(30):
        open_connections = gateway.server.server_state.connections
        before, turns = len(open_connections), 0
        clients = [
            socket.create_connection(("127.0.0.1", gateway.port)) for _ in range(CONNECTIONS)
        ]
        while len(open_connections) < before + CONNECTIONS:
            await asyncio.sleep(0)
            turns += 1
        for client in clients:
            client.close()
        return turns
