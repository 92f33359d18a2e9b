"""Work that requests about one picture share, and that tenants do not share."""

import asyncio
import io
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice, permutations
from typing import Any

import httpx
import pytest
from PIL import Image

from headrace_testing.api_keys import KeyBook
from headrace_testing.image_prompts import noise, save_chat_model
from headrace_testing.images import data_url
from headrace_testing.processes import Starter, until
from headrace_testing.stack import MODEL, EngineProcess, Stack
from headrace_testing.waiting import eventually

TOGETHER = 64
# Words of the model's tokenizer.
WORDS = ("the", "cat", "a", "mill", "one", "two", "tokens")
# Keys of images, and of their requests and tenants.
_IMAGE_KEY = re.compile(r'"(im|ir|it):\{[^"]*"')
_COUNTS = {
    "encoded": ("headrace_engine_encoder_images_total", ""),
    "already encoded": ("headrace_engine_encoder_cache_images_total", 'result="hit"'),
    "cached tokens": ("headrace_engine_prefix_cache_tokens_total", 'result="hit"'),
    "computed tokens": ("headrace_engine_prefix_cache_tokens_total", 'result="miss"'),
}


@dataclass(slots=True)
class Commands:
    """What Valkey has executed about images so far: one entry for each command, also of scripts."""

    seen: list[str] = field(default_factory=list)

    @property
    def dropped(self) -> int:
        """The number of requests that have dropped an image."""
        return sum(each.startswith("ZREM ") for each in self.seen)


@asynccontextmanager
async def watching(port: int) -> AsyncIterator[Commands]:
    """Follows Valkey's commands. Of a command that names keys of images, their kinds and the
    lengths of long values are kept, and nothing that names a tenant, a request or a picture."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    writer.write(b"MONITOR\r\n")
    await reader.readline()
    commands = Commands()

    async def follow() -> None:
        while line := (await reader.readline()).decode("latin-1"):
            words = re.findall(r'"((?:[^"\\]|\\.)*)"', line)
            kinds = _IMAGE_KEY.findall(line)
            if kinds:
                texts = [re.sub(r"\\x..|\\.", "?", word) for word in words]
                lengths = [str(len(text)) for text in texts if len(text) > 200]
                commands.seen.append(" ".join([words[0].upper(), *kinds, *lengths]))

    following = asyncio.create_task(follow())
    try:
        yield commands
    finally:
        writer.close()
        await asyncio.wait({following})


def encoded(picture: Image.Image) -> bytes:
    """A PNG whose length depends on the picture's size only."""
    out = io.BytesIO()
    picture.save(out, "PNG", compress_level=0)
    return out.getvalue()


class Sharing:
    """A gateway with two tenants and one engine."""

    def __init__(self, stack: Stack, keys: KeyBook, http: httpx.AsyncClient) -> None:
        self.stack, self._keys, self._http = stack, keys, http

    @property
    def engine(self) -> EngineProcess:
        return self.stack.engines[0]

    async def ask(self, tenant: str, picture: Image.Image, words: str = "one two " * 20) -> Any:
        image = {"type": "image_url", "image_url": {"url": data_url(encoded(picture))}}
        content = [
            {"type": "text", "text": words},
            image,
            {"type": "text", "text": "what is this"},
        ]
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
        }
        headers = self._keys.headers(tenant)
        answer = await self._http.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def work(
        self, tenant: str, picture: Image.Image
    ) -> tuple[Counter[str], dict[str, float]]:
        """What a request about a picture costs: Valkey's commands about images, and the engine's
        work."""
        before = await self.counts()
        async with watching(self.stack.valkey.port) as commands:
            await self.ask(tenant, picture)

            async def over() -> bool:
                return commands.dropped == 1 and self.engine.idle

            await eventually(over)
        after = await self.counts()
        return Counter(commands.seen), {name: after[name] - before[name] for name in after}

    async def counts(self) -> dict[str, float]:
        """What the processes have done so far."""
        done = {
            name: await asyncio.to_thread(self.engine.metric, metric, labels)
            for name, (metric, labels) in _COUNTS.items()
        }
        port = self.stack.gateways[0].metrics_port
        text = (await self._http.get(f"http://127.0.0.1:{port}/metrics")).text
        for result in ("decoded", "known"):
            found = re.search(rf'headrace_gateway_images_total\{{result="{result}"\}} (\S+)', text)
            done[result] = 0.0 if found is None else float(found[1])
        return done


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyBook:
    book = KeyBook(tmp_path_factory.mktemp("keys") / "keys.yaml")
    for tenant in ("a", "b"):
        book.add(tenant, tenant=f"team-{tenant}")
    return book


@pytest.fixture(scope="module")
def stack(
    tmp_path_factory: pytest.TempPathFactory, keys: KeyBook, start: Starter
) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("sharing")
    stack = Stack(save_chat_model(folder / "model", "qwen2.5-vl"), folder, start=start)
    try:
        stack.add_engine()
        stack.add_gateway("--api-keys-file", str(keys.path))
        stack.await_engines(1)
        yield stack
        until(stack.queue_is_empty, "the queue to be empty")
    finally:
        stack.close()


@pytest.fixture
async def sharing(stack: Stack, keys: KeyBook) -> AsyncIterator[Sharing]:
    async with httpx.AsyncClient(base_url=stack.gateways[0].url, timeout=120) as http:
        yield Sharing(stack, keys, http)


async def test_a_picture_that_another_tenant_has_sent_costs_as_much_as_a_new_one(
    sharing: Sharing,
) -> None:
    theirs, new, other = (noise(40, 32, seed) for seed in (1, 2, 3))
    await sharing.ask("a", theirs)
    await sharing.ask("b", other)  # so that both requests below find the text before the picture

    cost_of_theirs = await sharing.work("b", theirs)
    cost_of_new = await sharing.work("b", new)
    again = await sharing.work("b", theirs)

    assert cost_of_theirs == cost_of_new
    assert cost_of_new[1]["encoded"] == 1 and cost_of_new[1]["decoded"] == 1
    # What a tenant sends again costs less, so the measurement would show it.
    assert again[0] != cost_of_new[0]
    assert again[1]["encoded"] == 0 and again[1]["cached tokens"] > cost_of_new[1]["cached tokens"]


async def test_a_picture_of_64_requests_is_decoded_stored_and_encoded_once(
    sharing: Sharing,
) -> None:
    picture, before = noise(48, 40, 9), await sharing.counts()
    async with watching(sharing.stack.valkey.port) as commands:
        texts = islice(permutations(WORDS), TOGETHER)
        await asyncio.gather(*(sharing.ask("a", picture, " ".join(each)) for each in texts))

        async def over() -> bool:
            return commands.dropped == TOGETHER

        await eventually(over)
    after = await sharing.counts()
    stored = [each for each in commands.seen if each.startswith("SET im")]

    assert len(stored) == 1
    assert after["decoded"] - before["decoded"] == 1
    assert after["encoded"] - before["encoded"] == 1
    assert after["already encoded"] - before["already encoded"] == TOGETHER - 1
