"""Attacks that were found by hand, each by its name; they are always tried first."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from headrace_testing.stack import MODEL

from .attack import Answer, Attack, Client, exchange, head, post, together
from .document import BASES
from .sockets import crowd, drip, many, never_read, reset
from .world import EMBEDDER, LOOPING, Target

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
MIB = 2**20
Play = Callable[[Target], Awaitable[Answer]]
# The kubelet's probes fail three times in this period.
HELD_S = 4.0


def rows() -> list[Attack]:
    return [*_http(), *_bodies(), *_grammars(), *_tokenizers(), *_neighbours(), *_stores()]


def _attack(name: str, client: Client, play: Play, *, spoils: bool = False) -> Attack:
    return Attack(name, client, play, spoils)


def ask(path: str, content: bytes | Callable[[], bytes], times: int = 1) -> Play:
    """A request of the attacking tenant. Large content is given as a function, as most runs only
    list the attacks."""

    def play(target: Target) -> Awaitable[Answer]:
        sent = content if isinstance(content, bytes) else content()
        return many(target.api, [post(path, sent, target.attacker)] * times)

    return play


def fields(path: str, **more: Any) -> bytes:
    return json.dumps({**BASES[path], **more}, ensure_ascii=False).encode()


def _http() -> Iterator[Attack]:
    chunked = {"Transfer-Encoding": "chunked"}

    def stranger(body: bytes, headers: dict[str, str] | None = None, method: str = "POST") -> Play:
        return lambda target: exchange(
            target.api, [head(CHAT, None, headers, method) + b"\r\n" + body]
        )

    def tenant(*pieces: bytes) -> Play:
        return lambda target: exchange(
            target.api, [head(CHAT, target.attacker, chunked) + b"\r\n", *pieces]
        )

    body = fields(CHAT)
    sized = b"%x\r\n%b\r\n" % (len(body), body)
    trailers = b"A: \r\n" * 8_000_000
    yield _attack("trailers of 40 MB", "stranger", stranger(b"0\r\n" + trailers, chunked))
    yield _attack("trailers of 40 MB, keyed", "tenant", tenant(sized, b"0\r\n", trailers))
    small = {f"A{number}": "" for number in range(8_000)}
    yield _attack("8,000 small headers", "stranger", stranger(b"", small))
    extension = b"1;" + b"a" * 20_000_000
    yield _attack("a chunk extension of 20 MB", "stranger", stranger(extension, chunked))
    yield _attack("chunk extensions of 20 MB", "tenant", tenant(b"1;aaaaaaaaaa\r\n \r\n" * 10**6))
    yield _attack("a million chunks of a byte", "tenant", tenant(b"1\r\n \r\n" * 10**6))
    whole = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    yield _attack("10,000 requests at once on one connection", "stranger", _pipelined(whole))
    half = 64

    def half_sent(target: Target) -> Awaitable[Answer]:
        begun = head(CHAT, target.attacker) + b"Content-Length: 8000000\r\n\r\n" + b" " * 7_000_000
        return together(exchange(target.api, [begun]) for _ in range(half))

    yield _attack(f"{half} bodies of 8 MB without their end", "tenant", half_sent)
    slow = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Slow: "
    yield _attack("100 headers, a byte at a time", "stranger", lambda t: drip(t.api, 100, slow, 6))
    yield _attack("300 idle connections", "stranger", lambda t: crowd(t.api, 300, b"", HELD_S))
    long = fields(CHAT, max_tokens=2000, stream=True, n=16, logprobs=True, top_logprobs=20)
    yield _attack(
        "an answer that is not read",
        "tenant",
        lambda t: never_read(t.api, post(CHAT, long, t.attacker), HELD_S),
    )
    for count in (200, 4_000):  # the second is more than the backlog of the listening socket
        yield _attack(f"{count:,} requests that are reset", "tenant", _reset(long, count))


def _reset(body: bytes, count: int) -> Play:
    return lambda target: reset(target.api, post(CHAT, body, target.attacker), count)


def _pipelined(request: bytes) -> Play:
    return lambda target: exchange(target.api, [request * 10_000])


def _bodies() -> Iterator[Attack]:
    for size in (1, 2, 7):
        wrong = ask(CHAT, partial(_wrong_parts, size * MIB))
        yield _attack(f"{size} MiB of wrong parts of a message", "tenant", wrong)
    call = {"id": "a", "type": "function", "function": {"name": "a", "arguments": "{}"}}
    calls = [{"role": "assistant", "tool_calls": [call] * 55_000}]
    yield _attack("55,000 tool calls", "tenant", ask(CHAT, partial(fields, CHAT, messages=calls)))
    for name in ("self", "messages", "tools", "raise_exception", "bos_token", "kwargs"):
        yield _attack(f"a template's variable `{name}`", "tenant", _variable(name))
    yield _attack("40 chats whose template loops", "tenant", _loop)


def _wrong_parts(size: int) -> bytes:
    """A chat with one message, whose parts are numbers."""
    content = b'{"model":"%b","messages":[{"role":"user","content":[%b1]}]}'
    return content % (MODEL.encode(), b"1," * (size // 2))


async def _loop(target: Target) -> Answer:
    """Sends a chat whose template loops; meanwhile another tenant's chat with the model must be
    answered."""

    def chat(key: str, loops: int) -> bytes:
        return post(CHAT, fields(CHAT, model=LOOPING, chat_template_kwargs={"loops": loops}), key)

    looping = many(target.api, [chat(target.attacker, 10**5)] * 40)
    found, beside = await asyncio.gather(looping, exchange(target.api, [chat(target.bystander, 1)]))
    return found if beside.outcome == "200" else Answer("500", beside.seconds)


def _variable(name: str) -> Play:
    """Sends a template variable; the next request of the same connection must be answered too."""

    async def play(target: Target) -> Answer:
        stays = {"Connection": "keep-alive"}
        body = fields(CHAT, chat_template_kwargs={name: 1})
        first = post(CHAT, body, target.attacker, stays)
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", target.api)
        try:
            outcome = "200"
            for request in (first, post(CHAT, fields(CHAT), target.attacker, stays)):
                writer.write(request)
                answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 12)
                status = answer.split()[1].decode()
                outcome = status if status >= "500" else outcome
                length = answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
                await reader.readexactly(int(length or 0))
            return Answer(outcome, time.monotonic() - began)
        except (asyncio.IncompleteReadError, OSError):
            return Answer("500", time.monotonic() - began)
        except TimeoutError:
            return Answer("none", time.monotonic() - began)
        finally:
            writer.transport.abort()

    return play


def product(count: int) -> dict[str, Any]:
    """A schema whose branches multiply: each choice needs an automaton."""
    branches = [
        {"anyOf": [{"type": "string", "pattern": f"a{{{n}}}b"}, {"type": "object"}]}
        for n in range(count)
    ]
    return {"allOf": branches}


def as_format(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def _grammars() -> Iterator[Attack]:
    for count in (20, 40):
        body = fields(CHAT, response_format=as_format(product(count)))
        yield _attack(f"a schema of {count} anyOf in allOf", "tenant", ask(CHAT, body))
    yield _attack("schemas of a client that hung up", "tenant", _hung_up)


async def _hung_up(target: Target) -> Answer:
    """Disconnects; meanwhile other tenants' schemas and long prompts must be answered."""
    costly = fields(CHAT, response_format=as_format(product(40)))
    leaving = [asyncio.create_task(_leave(target, costly)) for _ in range(2)]
    await asyncio.wait(leaving)
    schema = as_format({"type": "object", "properties": {"a": {"type": "integer"}}})
    light = post(CHAT, fields(CHAT, response_format=schema), target.bystander)
    long = post(TOKENIZE, fields(TOKENIZE, prompt="the mill " * 2_000), target.bystander)
    return await many(target.api, [light, long])


async def _leave(target: Target, body: bytes) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", target.api)
    writer.write(post(CHAT, body, target.attacker))
    await writer.drain()
    await asyncio.sleep(3)
    writer.transport.abort()


def _tokenizers() -> Iterator[Attack]:
    texts = {"letters": "a", "words": "the mill ", "spaces": " ", "marks": "e\u0301\u0327"}
    for name, text in texts.items():
        body = partial(fields, TOKENIZE, prompt=text * (4 * MIB // len(text.encode())))
        yield _attack(f"4 MiB of {name} to tokenize", "tenant", ask(TOKENIZE, body))
    inputs = ["the mill " * 455] * 1020
    embedded = partial(fields, "/v1/embeddings", model=EMBEDDER, input=inputs)
    yield _attack("1,020 inputs to embed", "tenant", ask("/v1/embeddings", embedded))
    ids = partial(fields, "/detokenize", tokens=[5] * 2_000_000)
    yield _attack("2 million ids to detokenize", "tenant", ask("/detokenize", ids))


def _neighbours() -> Iterator[Attack]:
    yield from _scrapers("gateway", lambda target: target.gateway_metrics)
    yield from _scrapers("engine", lambda target: target.engine_metrics)


def _scrapers(name: str, port: Callable[[Target], int]) -> Iterator[Attack]:
    """Sends requests to one process's port for metrics and health."""
    begun = b"GET /metrics HTTP/1.1\r\nX: "
    whole = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    plays: dict[str, Play] = {
        "16 slow clients of": lambda t: drip(port(t), 16, begun, HELD_S),
        "300 idle clients of": lambda t: crowd(port(t), 300, begun, HELD_S),
        "64 readings at once of": lambda t: many(port(t), [whole] * 64),
        "an endless header to": lambda t: exchange(port(t), [begun + b"A" * 20_000_000]),
    }
    for description, play in plays.items():
        yield _attack(f"{description} the {name}'s metrics", "neighbour", play)


def _stores() -> Iterator[Attack]:
    yield _attack("65 stored requests of 6.5 MiB", "tenant", _stored, spoils=True)
    yield _attack("8 files of 60 MB", "tenant", _files, spoils=True)
    yield _attack("a batch with a line of 2 MiB of wrong parts", "tenant", _poisoned, spoils=True)


async def _stored(target: Target) -> Answer:
    """Stores requests with a very long `user`, which the gateway keeps without using it."""
    began = time.monotonic()
    for number in range(65):
        headers = {"x-resumable": "true", "Idempotency-Key": f"hostile-{number}"}
        body = fields(CHAT, user="u" * 6_800_000)
        answer = await exchange(target.api, [post(CHAT, body, target.attacker, headers)])
        if answer.outcome in ("none", "500"):
            return answer
    plain = post(CHAT, fields(CHAT), target.bystander)
    last = await exchange(target.api, [plain])
    # A bystander that is refused got no answer.
    outcome = "200" if last.outcome == "200" else "none"
    return Answer(outcome, min(last.seconds, time.monotonic() - began))


def form(
    content: bytes, name: str = "a.jsonl", purpose: str = "batch"
) -> tuple[bytes, dict[str, str]]:
    """A form with a file, and the header of the form."""
    edge = b"--edge\r\nContent-Disposition: form-data; "
    body = edge + b'name="purpose"\r\n\r\n%b\r\n' % purpose.encode()
    body += edge + b'name="file"; filename="%b"\r\n\r\n' % name.encode() + content
    return body + b"\r\n--edge--\r\n", {"Content-Type": "multipart/form-data; boundary=edge"}


async def _files(target: Target) -> Answer:
    line = json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": BASES[CHAT]})
    body, headers = form((line + "\n").encode() * (60_000_000 // len(line)))
    slowest = Answer("200", 0.0)
    for _ in range(8):
        request = post("/v1/files", body, target.attacker, headers)
        answer = await exchange(target.api, [request])
        if answer.outcome in ("none", "500") or answer.seconds > slowest.seconds:
            slowest = answer
    last = await exchange(target.api, [post(CHAT, fields(CHAT), target.bystander)])
    return slowest if last.outcome == "200" else Answer("none", last.seconds)


async def _poisoned(target: Target) -> Answer:
    """Sends a batch with one line, which was costly as a request."""
    wrong = [{"role": "user", "content": [1] * MIB}]
    line = {"custom_id": "a", "method": "POST", "url": CHAT}
    content = json.dumps({**line, "body": {"model": MODEL, "messages": wrong}}).encode() + b"\n"
    status, answer = await whole(target, "/v1/files", *form(content))
    if status != 200:
        return Answer(str(status), 0.0)
    batch = {"input_file_id": answer["id"], "endpoint": CHAT, "completion_window": "24h"}
    status, answer = await whole(target, "/v1/batches", json.dumps(batch).encode(), {})
    began = time.monotonic()
    while status == 200 and time.monotonic() < began + 8:
        await asyncio.sleep(0.2)
        status, answer = await whole(target, f"/v1/batches/{answer['id']}", b"", {}, "GET")
        if answer.get("status") in ("completed", "failed"):
            break
    return Answer(str(status or "closed"), time.monotonic() - began)


async def whole(
    target: Target, path: str, body: bytes, headers: dict[str, str], method: str = "POST"
) -> tuple[int, dict[str, Any]]:
    """The status and JSON of an answer; 0 if the connection was closed."""
    lines = head(path, target.attacker, {**headers, "Connection": "close"}, method)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.api)
        writer.write(lines + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = await asyncio.wait_for(reader.read(), 12)
        writer.close()
        top, _, content = answer.partition(b"\r\n\r\n")
        return int(top.split()[1]), json.loads(content)
    except (OSError, ValueError, IndexError, TimeoutError):
        return 0, {}
