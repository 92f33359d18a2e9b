"""With API keys: who is admitted, what each caller sees, and how the file of keys is followed."""

import asyncio
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, AuthenticationError, NotFoundError, PermissionDeniedError
from starlette.types import Receive, Scope, Send

from headrace_common.config.api_keys import new_key
from headrace_common.errors import SettingsError
from headrace_gateway.errors import ApiError
from headrace_gateway.http.authentication import OPEN_PATHS, Authentication
from headrace_gateway.limits import api_keys
from headrace_gateway.limits.api_keys import KeyFile, KeyRing
from headrace_gateway.limits.tenants import CALLER, Caller
from headrace_gateway.models.models import Models, ServedModel
from headrace_testing.api_keys import CREATED, KeyBook, MountedSecret
from headrace_testing.gateway import ANSWER, MODEL, Gateway, serve

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> KeyBook:
    book = KeyBook(tmp_path_factory.mktemp("keys") / "keys.yaml")
    book.add("alice", tenant="a", tenant_weight=2.5)
    book.add("bob", tenant="b", models=(MODEL,))
    book.add("carol", tenant="c", models=("another",), priority_ceiling=-3)
    book.add("batch", tenant="b", priority_ceiling=7)
    book.add("gone", expires=datetime(2020, 1, 1, tzinfo=UTC))
    return book


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guarded(checkpoint: Path, book: KeyBook) -> AsyncIterator[Gateway]:
    keys = KeyFile(book.path)
    async with serve(checkpoint, keys=keys) as running:
        yield running


@pytest.fixture
def gateway(guarded: Gateway) -> Gateway:
    guarded.engine.reset()
    return guarded


def client_of(gateway: Gateway, key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


# Which requests need a key


async def test_every_path_except_health_version_and_pages_needs_a_key(gateway: Gateway) -> None:
    paths = gateway.app.openapi()["paths"]
    assert {"/v1/chat/completions", "/tokenize", "/console/live", *OPEN_PATHS} <= set(paths)
    open_paths = OPEN_PATHS | {"/", "/console/index.html"}
    others = ["/nothing", "/v1/models/", "/health/live/", "//version", "/console/", "//"]
    for path in [*paths, *open_paths, *others]:
        for method in ("GET", "POST", "OPTIONS", "DELETE"):
            status = (await gateway.http.request(method, gateway.url + path)).status_code
            assert (status == 401) == (path not in open_paths), (method, path, status)


async def test_the_document_says_which_paths_need_a_key(gateway: Gateway) -> None:
    document = gateway.app.openapi()
    open_to_all = {
        path
        for path, operations in document["paths"].items()
        if all(operation.get("security") == [] for operation in operations.values())
    }

    assert document["components"]["securitySchemes"] == {
        "apiKey": {"type": "http", "scheme": "bearer"},
        "xApiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    assert document["security"] == [{"apiKey": []}, {"xApiKey": []}]
    assert open_to_all == OPEN_PATHS


async def test_a_key_opens_every_route(gateway: Gateway, book: KeyBook) -> None:
    gateway.http.headers.update(book.headers("alice"))
    try:
        chat = await gateway.chat()
        models = await gateway.http.get("/v1/models")
        unknown = await gateway.http.get("/nothing")
        document = await gateway.http.get("/openapi.json")
    finally:
        del gateway.http.headers["authorization"]

    assert chat.json()["choices"][0]["message"]["content"] == ANSWER
    assert (models.status_code, unknown.status_code, document.status_code) == (200, 404, 200)
    assert "x-ratelimit-limit-requests" not in chat.headers  # the key has no limits


async def test_the_sdk_sees_an_authentication_error(gateway: Gateway, book: KeyBook) -> None:
    for key in ("hr-wrong", book.secrets["alice"][:-1], book.secrets["gone"]):
        async with client_of(gateway, key) as client:
            with pytest.raises(AuthenticationError) as caught:
                await client.models.list()
        assert caught.value.code == "invalid_api_key"
        assert caught.value.type == "invalid_request_error"
        assert caught.value.response.headers["www-authenticate"] == (
            'Bearer realm="headrace", error="invalid_token"'
        )
    assert gateway.engine.submitted == []


async def raw(gateway: Gateway, *lines: bytes) -> tuple[int, bytes]:
    """GET /v1/models with these header lines, unchanged."""
    head = b"\r\n".join([b"GET /v1/models HTTP/1.1", b"host: x", b"connection: close", *lines])
    async with asyncio.timeout(60), gateway.connect() as (reader, writer):
        writer.write(head + b"\r\n\r\n")
        answer = await reader.read()
    return int(answer.split(b" ", 2)[1]), answer.partition(b"\r\n\r\n")[2]


async def test_all_wrong_keys_get_the_same_answer(gateway: Gateway, book: KeyBook) -> None:
    right = book.secrets["alice"].encode()
    bearer = b"Authorization: Bearer " + right
    hostile: list[list[bytes]] = [
        [],
        [b"Authorization:"],
        [b"Authorization: Bearer"],
        [b"Authorization: Bearer  "],
        [b"Authorization: " + right],
        [b"Authorization: Basic " + right],
        [bearer + b" " + right],
        [bearer + b"\x80"],
        [b"Authorization: Bearer \xff\xfe\x80"],
        [b"Authorization: Bearer " + b"x" * 60_000],
        [b"Authorization: Bearer\t" + right],
        [bearer, b"Authorization: Bearer hr-other"],
        [bearer, b"X-Api-Key: hr-other"],
        [b"Authorization: Basic " + right, b"X-Api-Key: " + right],
        [b"X-Api-Key:"],
        [b"Proxy-Authorization: Bearer " + right],
        [b"Cookie: key=" + right],
    ]
    answers = [await raw(gateway, *lines) for lines in hostile]
    by_url = await gateway.http.get("/v1/models", params={"api_key": right.decode()})

    assert set(answers) == {(401, by_url.content)}
    assert right not in by_url.content


async def test_bytes_that_no_header_may_have_end_the_connection(
    gateway: Gateway, book: KeyBook
) -> None:
    right = book.secrets["alice"].encode()
    assert (await raw(gateway, b"Authorization: Bearer " + right + b"\x00"))[0] == 400


@pytest.mark.parametrize("form", [b"Bearer %s", b"bearer %s", b"BEARER   %s  "])
async def test_the_authorization_scheme_is_case_insensitive(
    gateway: Gateway, book: KeyBook, form: bytes
) -> None:
    line = b"Authorization: " + form % book.secrets["alice"].encode()
    assert (await raw(gateway, line))[0] == 200


async def test_the_application_never_sees_a_key(book: KeyBook) -> None:
    """Only other headers are passed on; the caller is in the request's state."""
    keys = KeyFile(book.path)
    seen: list[Scope] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    async def nothing(*_: object) -> Any:
        raise AssertionError("nothing is read or answered here")

    secret = book.secrets["alice"].encode()
    headers = [(b"authorization", b"Bearer " + secret), (b"x-api-key", secret), (b"host", b"x")]
    scope = {"type": "http", "path": "/v1/models", "headers": headers, "state": {}}
    guard = Authentication(application, find=keys.find, refused=lambda: None)
    await guard(scope, nothing, nothing)

    (passed,) = seen
    assert passed["headers"] == [(b"host", b"x")]
    assert passed["state"][CALLER] == Caller(book.keys["alice"])
    assert secret not in repr(passed).encode()


async def test_a_forbidden_model_is_not_looked_up() -> None:
    class Watched:
        served: Mapping[str, ServedModel] = {}
        adapters: Mapping[str, str] = {}
        adapter_versions: Mapping[str, str] = {}
        removed = ()

        def forget(self, model: str) -> None:
            raise AssertionError("nothing is removed here")

        def __init__(self) -> None:
            self.asked_for: list[str | None] = []

        async def ensure_loaded(self, name: str | None) -> None:
            self.asked_for.append(name)

    discovered = Watched()
    models = Models({}, discovered).only({"mine"}.__contains__)
    for name in ("mine", "theirs"):
        with pytest.raises(ApiError, match="none is registered yet"):
            await models.find(name)

    assert discovered.asked_for == ["mine"]


async def test_anthropics_header_works_too(gateway: Gateway, book: KeyBook) -> None:
    headers = {"x-api-key": book.secrets["alice"]}
    assert (await gateway.http.get("/v1/models", headers=headers)).status_code == 200
    both = {**headers, **book.headers("alice")}
    assert (await gateway.http.get("/v1/models", headers=both)).status_code == 200


async def test_the_body_of_an_unauthenticated_request_is_not_read(gateway: Gateway) -> None:
    """Otherwise anyone could get a 413 for a length over the limit."""
    async with asyncio.timeout(60), gateway.connect() as (reader, writer):
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 99999999\r\n\r\n"
        )
        status = await reader.readline()

    assert b" 401 " in status


async def test_no_key_reaches_logs_or_the_queue(
    gateway: Gateway, book: KeyBook, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    headers = {**book.headers("alice"), "x-api-key": book.secrets["alice"]}
    await gateway.http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
    await gateway.http.get("/v1/models", headers={"authorization": "Bearer hr-a-wrong-one"})

    text = "\n".join(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)
    ended = next(r.__dict__ for r in caplog.records if r.getMessage() == "request ended")
    assert (ended["tenant"], ended["api_key"]) == ("a", "alice")
    assert book.secrets["alice"] not in text and "hr-a-wrong-one" not in text


# What a caller sees


async def test_models_are_those_of_the_key(gateway: Gateway, book: KeyBook) -> None:
    for name, served in (("alice", [MODEL]), ("bob", [MODEL]), ("carol", [])):
        async with client_of(gateway, book.secrets[name]) as client:
            assert [model.id async for model in client.models.list()] == served


async def test_a_forbidden_model_is_not_found(gateway: Gateway, book: KeyBook) -> None:
    async with client_of(gateway, book.secrets["carol"]) as client:
        errors = []
        for model in (MODEL, "never-heard-of"):
            with pytest.raises(NotFoundError) as caught:
                await client.completions.create(model=model, prompt="Hi")
            errors.append(caught.value.message.replace(model, "X"))
            with pytest.raises(NotFoundError):
                await client.models.retrieve(model)
        with pytest.raises(NotFoundError) as caught:
            await client.post("/tokenize", body={"model": MODEL, "prompt": "x"}, cast_to=object)

    assert errors[0] == errors[1]
    assert gateway.engine.submitted == []


async def test_health_shows_no_names_without_a_key(gateway: Gateway) -> None:
    unknown = await gateway.http.get("/health/ready", params={"model": "x"})
    gateway.engine.statuses = []
    gateway.forget_engines()
    unready = await gateway.http.get("/health/ready")
    gateway.engine.reset()
    gateway.forget_engines()

    assert (unknown.status_code, unready.status_code) == (404, 503)
    for answer in (unknown, unready):
        assert MODEL not in answer.text


async def test_a_request_carries_its_tenant_and_its_weight(gateway: Gateway, book: KeyBook) -> None:
    for name in ("alice", "bob"):
        await gateway.http.post(
            "/v1/completions", json={"prompt": "Hi"}, headers=book.headers(name)
        )

    carried = [(request.tenant, request.tenant_weight) for request in gateway.engine.submitted]
    assert carried == [("a", 2.5), ("b", 1.0)]


async def test_prefix_caches_are_separated_by_tenant_and_by_salt(
    gateway: Gateway, book: KeyBook
) -> None:
    """Tenants share no cache even with equal salts: 5 callers have 5 caches, and have the same ones
    again later."""
    requested = [("alice", None), ("bob", None), ("alice", "b"), ("bob", "b"), ("alice", "x")]
    for name, salt in [*requested, *requested, ("batch", None)]:
        body = {"prompt": "Hi"} if salt is None else {"prompt": "Hi", "cache_salt": salt}
        await gateway.http.post("/v1/completions", json=body, headers=book.headers(name))

    salts = [request.cache_salt for request in gateway.engine.submitted]
    assert len(set(salts[:5])) == 5 and salts[5:10] == salts[:5]
    assert salts[10] == salts[1]  # two keys of one tenant share
    for each in salts:  # and none of them equals a text that a request without a tenant could send
        with pytest.raises(UnicodeDecodeError):
            each.decode()


async def test_a_priority_over_the_ceiling_is_refused(gateway: Gateway, book: KeyBook) -> None:
    async with client_of(gateway, book.secrets["alice"]) as client:
        with pytest.raises(PermissionDeniedError, match="more urgent than this key") as caught:
            await client.completions.create(model=MODEL, prompt="Hi", extra_body={"priority": -1})
    assert (caught.value.code, caught.value.param) == ("priority_not_allowed", "priority")


@pytest.mark.parametrize(
    ("name", "requested", "given"),
    [("alice", None, 0), ("alice", 5, 5), ("batch", None, 7), ("batch", 9, 9)],
)
async def test_a_key_without_a_priority_gets_its_ceiling(
    gateway: Gateway, book: KeyBook, name: str, requested: int | None, given: int
) -> None:
    body = {"prompt": "Hi"} if requested is None else {"prompt": "Hi", "priority": requested}
    await gateway.http.post("/v1/completions", json=body, headers=book.headers(name))

    assert gateway.engine.submitted[0].priority == given


# Looking keys up


async def test_known_and_unknown_keys_are_looked_up_the_same_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The key itself is never compared: only hashes are, once each, in constant time."""
    key = new_key("a", CREATED)
    ring = KeyRing([key.entry])
    compared: list[tuple[bytes, bytes]] = []

    def spy(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return hmac.compare_digest(one, other)

    class Spied:
        compare_digest = staticmethod(spy)

    monkeypatch.setattr(api_keys, "hmac", Spied)
    secrets = [key.secret.encode(), b"hr-unknown", key.secret.encode()[:-1], b""]
    found = [ring.find(secret) for secret in secrets]

    assert found == [key.entry, None, None, None]
    assert [one for one, _ in compared] == [hashlib.sha256(s).digest() for s in secrets]
    assert all(len(other) == 32 for _, other in compared)


async def test_a_hash_is_not_a_key() -> None:
    key = new_key("a", CREATED)
    ring = KeyRing([key.entry])

    assert ring.find(key.entry.hash.encode()) is None
    assert ring.find(key.entry.digest) is None
    assert ring.find(b"") is None


# The file


@pytest.fixture
def own(tmp_path: Path) -> KeyBook:
    return KeyBook(tmp_path / "keys.yaml")


async def test_keys_are_read_again_when_the_file_changes(own: KeyBook) -> None:
    first = own.add("a").encode()
    keys = KeyFile(own.path)
    second = own.add("b").encode()
    assert keys.find(second) is None
    await keys.refresh()
    assert keys.find(first) is not None and keys.find(second) is not None
    own.remove("a")
    await keys.refresh()

    assert keys.find(first) is None and keys.find(second) is not None


async def test_a_swapped_link_is_seen(tmp_path: Path) -> None:
    mounted = MountedSecret(tmp_path / "mount")
    old, new = new_key("a", CREATED), new_key("a", CREATED)
    mounted.update([old.entry])
    keys = KeyFile(mounted.path)
    mounted.update([new.entry])
    await keys.refresh()

    assert keys.find(old.secret.encode()) is None
    assert keys.find(new.secret.encode()) == new.entry


async def test_the_file_is_watched_without_a_restart(own: KeyBook) -> None:
    own.add("a")
    looks: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()

    async def sleep(_: float) -> None:
        await looks.put(future := asyncio.get_running_loop().create_future())
        await future

    keys = KeyFile(own.path, sleep=sleep)
    keys.start()
    turn = await looks.get()
    secret = own.add("b").encode()
    turn.set_result(None)
    await looks.get()  # it has looked, and sleeps again

    assert keys.find(secret) is not None
    await keys.close()


@pytest.mark.parametrize("broken", ["keys: {", "keys: [{id: a}]", "", None])
async def test_a_broken_file_keeps_the_keys_and_is_reported_once(
    own: KeyBook, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    secret = own.add("a")
    keys = KeyFile(own.path)
    if broken is None:
        own.path.unlink()
    else:
        own.write(broken)
    for _ in range(3):
        await keys.refresh()

    assert keys.find(secret.encode()) is not None
    assert keys.failing
    warnings = [r for r in caplog.records if "the known ones stay" in r.getMessage()]
    assert [record.levelno for record in warnings] == [logging.ERROR]

    other = own.add("b").encode()
    await keys.refresh()
    assert keys.failing is None and keys.find(other) is not None


async def test_a_gateway_does_not_start_on_a_broken_file(own: KeyBook) -> None:
    with pytest.raises(SettingsError, match="api_keys_file: .*No such file"):
        KeyFile(own.path)
    own.write("keys: [{id: a, hash: x}]")
    with pytest.raises(SettingsError, match=r"keys\.0\.hash"):
        KeyFile(own.path)


async def test_keys_expire_on_time(own: KeyBook) -> None:
    now = [CREATED]
    secret = own.add("a", expires=CREATED + timedelta(hours=1)).encode()
    keys = KeyFile(own.path, clock=lambda: now[0])
    assert keys.find(secret) is not None
    now[0] += timedelta(hours=1)

    assert keys.find(secret) is None
