"""64 clients stream from two engines through two gateways: each gets the model's greedy tokens.

test_chaos tests what they get when something breaks meanwhile.
"""

import asyncio

from headrace_testing.greedy import GreedyCase
from headrace_testing.processes import until
from headrace_testing.stack import Stack
from headrace_testing.streams import Crowd


def test_undisturbed_streams_get_the_greedy_tokens(stack: Stack, cases: list[GreedyCase]) -> None:
    crowd = Crowd([gateway.url for gateway in stack.gateways], cases)

    asyncio.run(crowd.run())

    assert crowd.mistakes() == []
    until(stack.queue_is_empty, "the queue to be empty")
    for engine in stack.engines:
        until(lambda e=engine: e.idle, f"{engine.name} to hold no sequence and no block")  # type: ignore[misc]
