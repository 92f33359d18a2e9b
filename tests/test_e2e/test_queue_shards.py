"""Real gateways deal requests over the shards that real engines say; everything else in this folder
that uses the same stack runs over several shards as well."""

import httpx

from headrace_common.keys import shard_of
from headrace_testing.processes import until
from headrace_testing.stack import MODEL, Stack


def test_requests_go_to_all_shards(stack: Stack) -> None:
    body = {"model": MODEL, "prompt": [3, 4, 5], "max_tokens": 2}
    seen: set[int] = set()

    def all_are_seen(url: str) -> bool:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200
        seen.add(shard_of(answer.headers["x-request-id"]))
        return seen == {0, 1, 2}

    for gateway in stack.gateways[:2]:
        until(lambda url=gateway.url: all_are_seen(url), "an answer from each shard")  # type: ignore[misc]
        seen.clear()
