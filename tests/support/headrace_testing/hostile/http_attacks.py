"""Attacks through HTTP itself: odd headers, paths and chunks; slow, unfinished, reset requests."""

from collections.abc import Callable, Mapping, Sequence

from .attack import Attack, exchange, head, post
from .dice import Dice
from .document import BASES
from .rows import CHAT, fields
from .sockets import crowd, drip, many, never_read, reset
from .world import Target

_HEADERS = (
    "x-request-timeout",
    "x-request-deadline",
    "x-request-id",
    "Idempotency-Key",
    "x-resumable",
    "Last-Event-ID",
    "Authorization",
    "x-api-key",
    "traceparent",
    "tracestate",
    "baggage",
    "Cookie",
    "Origin",
    "Accept",
    "Expect",
    "Content-Type",
    "Content-Encoding",
    "Transfer-Encoding",
    "Content-Length",
    "anthropic-version",
    "Range",
    "Upgrade",
)
_TEXTS = (
    "",
    "a",
    "1",
    "-1",
    "1e400",
    "9" * 5_000,
    "a" * 60_000,
    "nan",
    "\udcff\udcfe",
    "a," * 20_000,
)
_HELD_S = 2.0


def draw(dice: Dice, paths: Sequence[str]) -> Attack:
    name = dice.pick("http", list(_KINDS))
    return _KINDS[name](dice, paths)


def _port(dice: Dice) -> tuple[str, Callable[[Target], int]]:
    ports: Mapping[str, Callable[[Target], int]] = {
        "the gateway": lambda target: target.api,
        "the gateway's metrics": lambda target: target.gateway_metrics,
        "the engine's metrics": lambda target: target.engine_metrics,
    }
    name = dice.pick("port", list(ports))
    return name, ports[name]


def _header(dice: Dice, paths: Sequence[str]) -> Attack:
    name, text = dice.pick("header", _HEADERS), dice.pick("header text", _TEXTS)
    path = dice.pick("header path", [CHAT, "/v1/responses", "/v1/embeddings"])
    body = fields(path)
    return Attack(
        f"{path} with {name}: {text[:20]!r}, {len(text)} letters",
        "tenant",
        lambda t: exchange(t.api, [post(path, body, t.attacker, {name: text})]),
    )


def _query(dice: Dice, paths: Sequence[str]) -> Attack:
    path = dice.pick("path", paths)
    text = dice.pick(
        "path text", ("a", "%00", "%ff" * 500, "a" * 60_000, "..%2f" * 99, "9" * 5_000)
    )
    filled = "".join(text if "}" in part else part for part in _parts(path))
    names = ("limit", "after", "order", "model", "starting_after", "stream", "after_id", "purpose")
    query = "&".join(f"{name}={text[:20_000]}" for name in dice.rng("query").sample(names, 3))
    return Attack(
        f"GET {path} with {text[:12]!r}, {len(text)} letters",
        "tenant",
        lambda t: exchange(t.api, [head(f"{filled}?{query}", t.attacker, None, "GET") + b"\r\n"]),
    )


def _parts(path: str) -> list[str]:
    return path.replace("{", "|{").replace("}", "}|").split("|")


def _chunks(dice: Dice, paths: Sequence[str]) -> Attack:
    """Sends a chunked body with chunks that are too many, too long, malformed or never complete."""
    count = dice.size("chunks", 100, 1_000_000)
    letters = dice.size("letters", 1, 60_000)
    kinds: Mapping[str, Callable[[], bytes]] = {
        "chunks of a byte": lambda: b"1\r\n \r\n" * count,
        "chunk extensions": lambda: (
            (b"1;" + b"a" * min(letters, 20_000_000 // count) + b"\r\n \r\n") * count
        ),
        "a trailer's name": lambda: b"0\r\n" + b"a" * count * 10,
        "trailers": lambda: b"0\r\n" + b"A: b\r\n" * count,
        "a size with leading zeros": lambda: b"0" * count * 5,
        "too large a size": lambda: b"f" * letters,
        "empty lines": lambda: b"\r\n" * count,
        "a chunk without an end": lambda: b"ffffff\r\n" + b" " * count,
    }
    name = dice.pick("chunk kind", list(kinds))
    keyed = dice.pick("keyed", [True, False])
    chunked = {"Transfer-Encoding": "chunked"}
    return Attack(
        f"{name}, {count:,} times, {'with' if keyed else 'without'} a key",
        "tenant" if keyed else "stranger",
        lambda t: exchange(
            t.api,
            [head(CHAT, t.attacker if keyed else None, chunked) + b"\r\n", kinds[name]()],
        ),
    )


def _slow(dice: Dice, paths: Sequence[str]) -> Attack:
    port_name, port = _port(dice)
    count = dice.size("slow", 1, 64)
    beginnings = (b"", b"G", b"GET / HTTP/1.1\r\nX: ", b"POST /v1/files HTTP/1.1\r\n")
    beginning = dice.pick("beginning", beginnings)
    return Attack(
        f"{count} slow connections to {port_name} from {beginning!r}",
        "neighbour",
        lambda t: drip(port(t), count, beginning, _HELD_S),
    )


def _unfinished_bodies(dice: Dice, paths: Sequence[str]) -> Attack:
    """Sends bodies that do not end: the gateway waits, and keeps the bytes that have arrived."""
    size, count = dice.size("half", 1_000, 7_900_000), dice.pick("halves", (1, 4, 16))
    count = max(1, min(count, 64_000_000 // size))
    path = dice.pick("half path", [*BASES, "/v1/files"])
    kind = "multipart/form-data; boundary=x" if path == "/v1/files" else "application/json"

    def sent(target: Target) -> bytes:
        lines = head(path, target.attacker, {"Content-Type": kind})
        return lines + b"Content-Length: 8000000\r\n\r\n" + b" " * size

    return Attack(
        f"{count} bodies of {path} that end after {size:,} bytes",
        "tenant",
        lambda t: many(t.api, [sent(t)] * count),
    )


def _crowded(dice: Dice, paths: Sequence[str]) -> Attack:
    port_name, port = _port(dice)
    count = dice.size("crowd", 2, 240)
    beginning = dice.pick(
        "crowd sends", (b"", b"GET /metrics HTTP/1.1\r\nX: ", b"\r\n", b"\x16\x03")
    )
    return Attack(
        f"{count} connections to {port_name} that send {beginning!r} and stay",
        "neighbour",
        lambda t: crowd(port(t), count, beginning, _HELD_S),
    )


def _reset_requests(dice: Dice, paths: Sequence[str]) -> Attack:
    path = dice.pick("left path", [CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings"])
    count = dice.size("left", 1, 100)
    more = {} if path == "/v1/embeddings" else {"stream": True}
    body = fields(path, **more)
    return Attack(
        f"{count} requests of {path} that are reset",
        "tenant",
        lambda t: reset(t.api, post(path, body, t.attacker), count),
    )


def _unread_answers(dice: Dice, paths: Sequence[str]) -> Attack:
    count = dice.size("unread", 1, 64)
    path = dice.pick("unread path", ["/openapi.json", "/v1/models", "/metrics"])
    port_name, port = _port(dice)

    def sent(target: Target) -> bytes:
        return (head(path, target.attacker, None, "GET") + b"\r\n") * count

    return Attack(
        f"{count} answers to {path} of {port_name} that no client reads",
        "tenant",
        lambda t: never_read(port(t), sent(t), _HELD_S),
    )


def _lines(dice: Dice, paths: Sequence[str]) -> Attack:
    """Sends bytes that are not HTTP to any port."""
    port_name, port = _port(dice)
    size = dice.size("line", 10, 20_000_000)
    kinds: Mapping[str, Callable[[], bytes]] = {
        "a request line": lambda: b"GET /" + b"a" * size + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        "a method": lambda: b"A" * size,
        "a header": lambda: b"GET / HTTP/1.1\r\nX: " + b"a" * size,
        "a header's name": lambda: b"GET / HTTP/1.1\r\n" + b"a" * size,
        "headers": lambda: b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * (size // 6),
        "folded headers": lambda: b"GET / HTTP/1.1\r\nA: b\r\n" + b" c\r\n" * (size // 4),
        "nulls": lambda: b"\x00" * size,
        "requests": lambda: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * (size // 26),
    }
    name = dice.pick("line kind", list(kinds))
    return Attack(
        f"{name} of {size:,} bytes to {port_name}",
        "stranger",
        lambda t: exchange(port(t), [kinds[name]()]),
    )


_KINDS: Mapping[str, Callable[[Dice, Sequence[str]], Attack]] = {
    "header": _header,
    "query": _query,
    "chunks": _chunks,
    "slow": _slow,
    "half": _unfinished_bodies,
    "crowd": _crowded,
    "left": _reset_requests,
    "unread": _unread_answers,
    "lines": _lines,
}
