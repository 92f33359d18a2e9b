"""Rate limits of keys as their clients see them: on one gateway with a virtual clock, and on two
gateways over a real Valkey."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, RateLimitError

from headrace_common.errors import FailureCode, QueueFull
from headrace_common.protocol.base import QueueLimits
from headrace_common.protocol.limits import LEASE_MS
from headrace_common.protocol.redis.limits import RedisKeyUsage
from headrace_common.wire import keys
from headrace_common.wire.messages import GenerateRequest
from headrace_gateway.http.app import AppDependencies, DurableStores, create_app
from headrace_gateway.limits.api_keys import KeyFile
from headrace_gateway.limits.rate_limits import ASSUMED_OUTPUT, RateLimits, go_duration
from headrace_gateway.models.loading import load_static
from headrace_gateway.models.models import Models
from headrace_gateway.queue_client.client import Delta, GenerationClient
from headrace_gateway.settings import GatewaySettings
from headrace_testing import backends
from headrace_testing.api_keys import KeyBook
from headrace_testing.backends import OverRedis
from headrace_testing.fake_engine import FakeEngine
from headrace_testing.gateway import MODEL, Gateway, ScriptedGeneration, failed, running, serve
from headrace_testing.memory_queue.limits import MemoryKeyUsage
from headrace_testing.valkey import ValkeyServer
from headrace_testing.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")


@dataclass(slots=True)
class Limited:
    """A gateway with a virtual clock, which a test moves."""

    gateway: Gateway
    keys: KeyFile
    book: KeyBook
    usage: MemoryKeyUsage
    now: list[float]
    count: int = 0

    def key(self, **limits: int) -> str:
        """Adds another key with these limits."""
        self.count += 1
        name = f"key{self.count}"
        self.book.add(name, limits=limits)
        self.keys.load()
        return name

    async def ask(self, key: str, **fields: object) -> httpx.Response:
        body = {"model": MODEL, "prompt": [5] * 10, "max_tokens": 5, **fields}
        headers = self.book.headers(key)
        return await self.gateway.http.post("/v1/completions", json=body, headers=headers)

    def client(self, key: str) -> AsyncOpenAI:
        secret = self.book.secrets[key]
        return AsyncOpenAI(base_url=f"{self.gateway.url}/v1", api_key=secret, max_retries=0)

    @property
    def limits(self) -> RateLimits:
        limits = self.gateway.app.state.services.pipeline.rate_limits
        assert isinstance(limits, RateLimits)
        return limits

    async def settled(self) -> None:
        """Waits until all requests have ended and are charged."""

        async def nothing_runs() -> bool:
            return self.limits.running == 0

        await eventually(nothing_runs)
        await self.limits.flush()

    async def submitted(self, count: int) -> None:
        async def all_there() -> bool:
            return len(self.gateway.engine.submitted) == count

        await eventually(all_there)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Limited]:
    book = KeyBook(tmp_path_factory.mktemp("keys") / "keys.yaml")
    book.write()
    key_file = KeyFile(book.path)
    now = [0.0]
    usage = MemoryKeyUsage(lambda: now[0])
    async with serve(checkpoint, keys=key_file, usage=usage) as gateway:
        yield Limited(gateway, key_file, book, usage, now)


@pytest.fixture
def limited(shared: Limited) -> Limited:
    shared.gateway.engine.reset()
    shared.usage.available = True
    return shared


async def test_headers_say_what_is_left_of_each_limit(limited: Limited) -> None:
    key = limited.key(requests_per_minute=60, tokens_per_minute=600)

    answer = await limited.ask(key)

    assert {n: v for n, v in answer.headers.items() if n.startswith("x-ratelimit")} == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "585",
        "x-ratelimit-reset-tokens": "1.5s",
    }


TOKEN_READERS: dict[str, dict[str, object]] = {
    "/tokenize": {"prompt": "x" * 30},
    "/detokenize": {"tokens": [5] * 30},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x" * 30}]},
    "/v1/responses/input_tokens": {"input": "x" * 30},
}


@pytest.mark.parametrize(("path", "body"), TOKEN_READERS.items(), ids=TOKEN_READERS.keys())
async def test_a_request_without_output_is_counted_and_charged(
    limited: Limited, path: str, body: dict[str, object]
) -> None:
    key = limited.key(requests_per_minute=3, tokens_per_minute=20)

    async def read() -> httpx.Response:
        headers = limited.book.headers(key)
        return await limited.gateway.http.post(path, json=body, headers=headers)

    first = await read()
    await limited.settled()
    second = await read()

    assert first.status_code == 200, first.text
    assert first.headers["x-ratelimit-remaining-requests"] == "2"
    assert (second.status_code, second.json()["error"]["type"]) in (
        (429, "tokens"),
        (429, "rate_limit_error"),
    )


@pytest.mark.parametrize("path", TOKEN_READERS)
async def test_a_request_without_output_ends_in_time(
    limited: Limited, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_gateway.generation.admission.TOKENIZING_S", 0.0)
    monkeypatch.setattr("headrace_gateway.limits.work.INLINE_SIZE", 0)
    headers = limited.book.headers(limited.key())

    answer = await limited.gateway.http.post(path, json=TOKEN_READERS[path], headers=headers)

    assert answer.status_code == 504, answer.text
    assert "not counted within 0 s; send less at once" in answer.json()["error"]["message"]


async def test_requests_without_output_count_towards_the_same_minute(limited: Limited) -> None:
    key = limited.key(requests_per_minute=2)
    headers = limited.book.headers(key)
    for _ in range(2):
        answer = await limited.gateway.http.post("/tokenize", json={"prompt": "x"}, headers=headers)
        assert answer.status_code == 200

    assert (await limited.ask(key)).status_code == 429


async def test_streams_have_the_headers_too(limited: Limited) -> None:
    answer = await limited.ask(limited.key(requests_per_minute=2), stream=True)

    assert answer.headers["x-ratelimit-remaining-requests"] == "1"
    assert "x-ratelimit-limit-tokens" not in answer.headers


async def test_the_sdk_sees_a_rate_limit_error(limited: Limited) -> None:
    key = limited.key(requests_per_minute=2)
    async with limited.client(key) as client:
        for _ in range(2):
            await client.completions.create(model=MODEL, prompt="Hi")
        with pytest.raises(RateLimitError) as caught:
            await client.completions.create(model=MODEL, prompt="Hi")
    error, headers = caught.value, caught.value.response.headers

    assert (error.code, error.type) == ("rate_limit_exceeded", "requests")
    assert "Limit 2, Used 2, Requested 1. Please try again in 30s." in error.message
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("30", "30000")
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-ratelimit-reset-requests"] == "1m0s"


async def test_a_client_that_retries_after_retry_after_is_served(limited: Limited) -> None:
    key = limited.key(requests_per_minute=2)
    for _ in range(2):
        await limited.ask(key)
    refused = await limited.ask(key)
    limited.now[0] += float(refused.headers["retry-after"])

    assert (await limited.ask(key)).status_code == 200
    assert (await limited.ask(key)).status_code == 429


async def test_tokens_are_charged_as_they_were_used(limited: Limited) -> None:
    """60 tokens are reserved; the answer ends long before its bound."""
    key = limited.key(tokens_per_minute=600)
    limited.gateway.engine.script = limited.gateway.engine.say("Once")
    first = await limited.ask(key, max_tokens=50)
    await limited.settled()
    second = await limited.ask(key, max_tokens=50)

    used = first.json()["usage"]["total_tokens"]
    assert first.headers["x-ratelimit-remaining-tokens"] == "540"
    assert used < 60
    assert second.headers["x-ratelimit-remaining-tokens"] == str(600 - used - 60)


@pytest.mark.parametrize("stream", [True, False])
async def test_every_choice_and_prompt_counts(limited: Limited, stream: bool) -> None:
    key = limited.key(tokens_per_minute=10_000)
    prompts = [[5] * 10, [6] * 20]
    await limited.ask(key, prompt=prompts, n=3, max_tokens=4, stream=stream)
    await limited.settled()
    after = await limited.ask(key, prompt=[1], max_tokens=1)

    assert after.headers["x-ratelimit-remaining-tokens"] == str(10_000 - 30 - 6 * 4 - 2)


async def test_a_days_output_is_refused_until_midnight_utc(limited: Limited) -> None:
    key = limited.key(output_tokens_per_day=12)
    used = 0
    for _ in range(2):
        answer = await limited.ask(key)
        used += answer.json()["usage"]["completion_tokens"]
        await limited.settled()
    refused = await limited.ask(key)

    assert (refused.status_code, used) == (429, 10)
    assert refused.json()["error"]["type"] == "output_tokens_per_day"
    assert "Limit 12, Used 10, Requested 5" in refused.json()["error"]["message"]
    left = 86_400 - limited.now[0] % 86_400
    assert int(refused.headers["retry-after"]) == pytest.approx(left, abs=1)
    limited.now[0] += float(refused.headers["retry-after"])
    assert (await limited.ask(key)).status_code == 200


async def test_a_days_prompts_are_counted(limited: Limited) -> None:
    key = limited.key(prompt_tokens_per_day=25)
    statuses = [(await limited.ask(key)).status_code for _ in range(3)]

    assert statuses == [200, 200, 429]


async def test_an_answer_without_a_bound_reserves_little(limited: Limited) -> None:
    key = limited.key(tokens_per_minute=1000)
    headers = limited.book.headers(key)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    answer = await limited.gateway.http.post("/v1/chat/completions", json=body, headers=headers)

    left = int(answer.headers["x-ratelimit-remaining-tokens"])
    prompt = answer.json()["usage"]["prompt_tokens"]
    assert left == 1000 - prompt - ASSUMED_OUTPUT


async def test_a_bound_over_the_limit_takes_a_full_minute_but_no_more(limited: Limited) -> None:
    key = limited.key(tokens_per_minute=100)
    answer = await limited.ask(key, max_tokens=400)

    assert answer.status_code == 200
    assert answer.headers["x-ratelimit-remaining-tokens"] == "0"


async def test_a_prompt_over_the_limit_never_fits(limited: Limited) -> None:
    answer = await limited.ask(limited.key(tokens_per_minute=9))

    assert answer.status_code == 429
    assert answer.json()["error"]["type"] == "tokens"
    assert "Request too large" in answer.json()["error"]["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers


async def test_requests_beyond_the_concurrency_limit_are_refused(limited: Limited) -> None:
    key = limited.key(concurrency=2)
    limited.gateway.engine.gate.clear()
    running = [asyncio.create_task(limited.ask(key)) for _ in range(2)]
    await limited.submitted(2)
    refused = await limited.ask(key)
    limited.gateway.engine.gate.set()
    answers = await asyncio.gather(*running)
    await limited.settled()

    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "concurrency"
    assert int(refused.headers["retry-after"]) >= 1
    assert [answer.status_code for answer in answers] == [200, 200]
    assert (await limited.ask(key)).status_code == 200


async def test_a_client_that_hangs_up_frees_its_place_and_pays_for_its_tokens(
    limited: Limited,
) -> None:
    key = limited.key(concurrency=1, tokens_per_minute=1000)
    limited.gateway.engine.gate.clear()
    body = {"model": MODEL, "prompt": [5] * 10, "max_tokens": 100, "stream": True}
    request = limited.gateway.http.stream(
        "POST", "/v1/completions", json=body, headers=limited.book.headers(key)
    )
    async with request as answer:
        assert answer.status_code == 200
    await limited.settled()
    limited.gateway.engine.gate.set()
    after = await limited.ask(key)

    assert after.status_code == 200
    assert after.headers["x-ratelimit-remaining-tokens"] == str(1000 - 10 - 15)


async def test_requests_refused_by_the_queue_cost_nothing(limited: Limited) -> None:
    key = limited.key(requests_per_minute=5, tokens_per_minute=100, concurrency=1)
    limited.gateway.engine.refusal = QueueFull("full", retry_after=1)
    assert (await limited.ask(key)).status_code == 503
    await limited.settled()
    limited.gateway.engine.refusal = None
    answer = await limited.ask(key)

    assert answer.headers["x-ratelimit-remaining-requests"] == "4"
    assert answer.headers["x-ratelimit-remaining-tokens"] == "85"


async def test_if_one_of_several_prompts_is_refused_none_is_charged(limited: Limited) -> None:
    key = limited.key(requests_per_minute=5, tokens_per_minute=100, concurrency=1)
    engine = limited.gateway.engine
    submit = engine.submit

    async def only_one(request: GenerateRequest) -> ScriptedGeneration:
        if engine.submitted:
            raise QueueFull("full", retry_after=1)
        return await submit(request)

    engine.submit = only_one  # type: ignore[method-assign]
    answer = await limited.ask(key, prompt=[[5] * 10, [6] * 10])
    del engine.submit
    await limited.settled()
    after = await limited.ask(key)

    assert answer.status_code == 503
    assert after.headers["x-ratelimit-remaining-requests"] == "4"
    assert after.headers["x-ratelimit-remaining-tokens"] == "85"


async def test_inputs_that_the_queue_took_later_are_charged(limited: Limited) -> None:
    key = limited.key(tokens_per_minute=100)
    engine = limited.gateway.engine
    engine.script = lambda _: [
        Delta(choice=0, token_ids=(), finish_reason="stop", embedding=b"0000")
    ]
    submit, refused = engine.submit, list[str]()

    async def each_once_refused(request: GenerateRequest) -> ScriptedGeneration:
        if engine.submitted and request.request_id not in refused:
            refused.append(request.request_id)
            raise QueueFull("full", retry_after=0.001)
        return await submit(request)

    engine.submit = each_once_refused  # type: ignore[method-assign]
    answer = await limited.gateway.http.post(
        "/v1/embeddings",
        json={"model": MODEL, "input": [[5] * 10, [6] * 10]},
        headers=limited.book.headers(key),
    )
    del engine.submit
    await limited.settled()
    engine.reset()
    after = await limited.ask(key)

    assert answer.status_code == 200 and refused
    assert after.headers["x-ratelimit-remaining-tokens"] == str(100 - 20 - 15)


async def test_a_request_that_fails_later_is_charged(limited: Limited) -> None:
    key = limited.key(requests_per_minute=5, concurrency=1)
    limited.gateway.engine.script = lambda _: []
    limited.gateway.engine.failure = failed(FailureCode.POISONED)
    assert (await limited.ask(key)).status_code == 500
    await limited.settled()
    limited.gateway.engine.reset()

    assert (await limited.ask(key)).headers["x-ratelimit-remaining-requests"] == "3"


async def test_invalid_requests_are_not_counted(limited: Limited) -> None:
    key = limited.key(requests_per_minute=5)
    assert (await limited.ask(key, temperature=-1)).status_code == 400

    assert (await limited.ask(key)).headers["x-ratelimit-remaining-requests"] == "4"


async def test_limits_change_with_the_file(limited: Limited) -> None:
    key = limited.key(requests_per_minute=1)
    await limited.ask(key)
    assert (await limited.ask(key)).status_code == 429
    wider = limited.book.keys[key].limits.model_copy(update={"requests_per_minute": 2})
    limited.book.change(key, limits=wider)
    limited.keys.load()

    assert (await limited.ask(key)).status_code == 200


async def test_without_redis_no_request_is_admitted(limited: Limited) -> None:
    counted, free = limited.key(requests_per_minute=5), limited.key()
    limited.usage.available = False

    assert (await limited.ask(counted)).status_code == 503
    assert (await limited.ask(free)).status_code == 200


async def test_a_long_request_keeps_its_concurrency_slot(limited: Limited) -> None:
    key = limited.key(concurrency=1)
    limited.gateway.engine.gate.clear()
    long = asyncio.create_task(limited.ask(key))
    await limited.submitted(1)
    for _ in range(4):
        limited.now[0] += LEASE_MS / 1000 - 5
        await limited.limits.renew()
    refused = await limited.ask(key)
    limited.gateway.engine.gate.set()

    assert refused.status_code == 429
    assert (await long).status_code == 200
    await limited.settled()
    assert limited.limits.running == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.012, "12ms"),
        (0.9999, "1s"),
        (1.5, "1.5s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (3725.25, "1h2m5.25s"),
    ],
)
async def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert go_duration(seconds) == text


# Two gateways over Valkey


@dataclass(slots=True)
class Pair:
    """Two gateways, each with connections of its own, and an engine of the model."""

    book: KeyBook
    gateways: list[httpx.AsyncClient]
    over: OverRedis

    async def places(self, key: str, count: int) -> None:
        """Waits until `count` requests of the key run."""

        async def reached() -> bool:
            running = await self.over.client.command("ZCARD", keys.key_leases(key))
            return int(running) == count

        await eventually(reached)

    async def ask(
        self, number: int, key: str, headers: Mapping[str, str] | None = None, **fields: object
    ) -> httpx.Response:
        body = {"prompt": [5] * 10, "max_tokens": 5, **fields}
        http = self.gateways[number % len(self.gateways)]
        sent = {**self.book.headers(key), **(headers or {})}
        return await http.post("/v1/completions", json=body, headers=sent)


@pytest_asyncio.fixture(loop_scope="session")
async def pair(valkey: ValkeyServer, checkpoint: Path, tmp_path: Path) -> AsyncIterator[Pair]:
    book = KeyBook(tmp_path / "keys.yaml")
    book.add("ten", limits={"requests_per_minute": 10})
    book.add("two", limits={"concurrency": 2})
    book.add("tokens", limits={"tokens_per_minute": 1000})
    book.add("other", tenant="another")
    over = OverRedis(valkey.url, block=1.0)
    await over.wipe()
    engine = FakeEngine(over.engine(), backends.MODEL, token_delay=0.001)
    task = asyncio.create_task(engine.run())
    async with AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(_gateway(over, f"g{number}", book, checkpoint))
            for number in range(2)
        ]
        yield Pair(book, gateways, over)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await over.close()


@asynccontextmanager
async def _gateway(
    over: OverRedis, name: str, book: KeyBook, checkpoint: Path
) -> AsyncIterator[httpx.AsyncClient]:
    settings = GatewaySettings(
        model=str(checkpoint), served_model_name=backends.MODEL, port=0, drain_timeout=0
    )
    key_file = KeyFile(book.path)
    queue = over.gateway(name)
    client = GenerationClient(queue, QueueLimits())
    await client.start()
    served = Models(load_static(settings))
    usage = RedisKeyUsage(over.connect())
    deps = AppDependencies(
        served=served,
        client=client,
        queue=queue,
        keys=key_file,
        usage=usage,
        durable=DurableStores(over.request_store(), queue, over.accounts()),
    )
    async with running(create_app(settings, deps), settings) as (_, port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            yield http
    await client.close()


def come_back(began: float) -> float:
    """The tokens that a key with 1000 a minute may have got back since then, however slow the
    machine is."""
    return (time.monotonic() - began) * 1000 / 60


async def test_two_gateways_share_the_requests_of_a_minute(pair: Pair) -> None:
    answers = await asyncio.gather(*(pair.ask(number, "ten") for number in range(24)))

    statuses = [answer.status_code for answer in answers]
    assert (statuses.count(200), statuses.count(429)) == (10, 14)
    waits = [float(a.headers["retry-after-ms"]) for a in answers if a.status_code == 429]
    assert all(0 < wait <= 6000 for wait in waits)


async def test_two_gateways_share_the_concurrency_limit(pair: Pair) -> None:
    streams = [asyncio.create_task(pair.ask(number, "two", max_tokens=400)) for number in range(2)]
    await pair.places("two", 2)
    refused = [await pair.ask(number, "two") for number in range(2)]
    await asyncio.gather(*streams)
    await pair.places("two", 0)

    assert [answer.status_code for answer in refused] == [429, 429]
    assert (await pair.ask(0, "two")).status_code == 200


async def test_two_gateways_charge_one_account(pair: Pair) -> None:
    """Each of 20 requests uses 15 of 1000 tokens; both gateways know the rest."""
    began = time.monotonic()
    for number in range(20):
        assert (await pair.ask(number, "tokens")).status_code == 200
    await pair.places("tokens", 0)
    answer = await pair.ask(1, "tokens")

    left = int(answer.headers["x-ratelimit-remaining-tokens"])
    assert 1000 - 21 * 15 <= left <= 1000 - 20 * 15 + come_back(began)


async def test_a_request_that_outlives_its_client_is_charged_at_its_end(pair: Pair) -> None:
    began = time.monotonic()
    answer = await pair.ask(0, "tokens", max_tokens=300, background=True)
    assert answer.status_code == 202, answer.text
    assert answer.headers["x-ratelimit-limit-tokens"] == "1000"
    await pair.places("tokens", 0)
    after = await pair.ask(1, "tokens")

    left = int(after.headers["x-ratelimit-remaining-tokens"])
    assert 1000 - 325 <= left <= 1000 - 310 + come_back(began)


async def test_tenants_have_idempotency_keys_and_requests_of_their_own(pair: Pair) -> None:
    """A tenant cannot find another tenant's stored data by idempotency key or by id."""
    locations = []
    for number, key in enumerate(("ten", "other", "ten")):
        answer = await pair.ask(number, key, headers={"idempotency-key": "the-same"})
        assert answer.status_code == 200, answer.text
        locations.append(answer.headers["content-location"])
    http = pair.gateways[0]
    own, foreign = [
        await http.get(locations[0], headers=pair.book.headers(key)) for key in ("ten", "other")
    ]
    events, cancelled = [
        await http.request(method, path, headers=pair.book.headers("other"))
        for method, path in (("GET", f"{locations[0]}/events"), ("DELETE", locations[0]))
    ]

    assert locations[0] == locations[2] != locations[1]
    assert own.status_code == 200
    assert {foreign.status_code, events.status_code, cancelled.status_code} == {404}
    assert {answer.json()["error"]["code"] for answer in (foreign, events, cancelled)} == {
        "request_not_found"
    }


async def test_a_repeated_request_is_counted_and_its_tokens_are_not(pair: Pair) -> None:
    for _ in range(3):
        await pair.ask(0, "tokens", headers={"idempotency-key": "again"})
        await pair.places("tokens", 0)
    after = await pair.ask(0, "tokens")

    left = int(after.headers["x-ratelimit-remaining-tokens"])
    assert 1000 - 30 <= left < 1000 - 30 + 60
