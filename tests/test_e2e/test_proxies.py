"""Streams through the proxies that users put in front of gateways, with their usual settings."""

import asyncio
from pathlib import Path

import pytest

from headrace_testing.greedy import GreedyCase
from headrace_testing.proxies import PROXIES, proxy
from headrace_testing.stack import Stack
from headrace_testing.streams import Crowd


@pytest.mark.parametrize("name", PROXIES)
def test_streams_through_a_proxy_get_the_greedy_tokens(
    name: str, stack: Stack, cases: list[GreedyCase], tmp_path: Path
) -> None:
    urls = [gateway.url for gateway in stack.gateways]
    with proxy(name, urls, tmp_path) as url:
        crowd = Crowd([url], cases[:24])

        asyncio.run(crowd.run())

    assert crowd.mistakes() == []
