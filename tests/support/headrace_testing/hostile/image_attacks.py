"""Attacks with images and videos: bombs, damaged files, other types, very many, and URLs of the
inside."""

import asyncio
import base64
import io
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

from PIL import Image

from headrace_testing.images import (
    KINDS,
    bomb,
    data_url,
    picture,
    png_of_size,
    slow_jpeg,
    texts_png,
    video_part,
)

from .attack import Answer, Attack, post
from .rows import CHAT, MIB, ask, form
from .sockets import many
from .world import INNER_HOSTS, VISION, Target

# Makes the URLs of the images of a request; most runs only list the attacks.
Urls = Callable[[], Sequence[str]]


def image_attacks() -> list[Attack]:
    return [*_bombs(), *_files(), *_urls(), *_videos(), *_places(), *_uploads()]


def _attack(name: str, urls: Urls, *, times: int = 1, refused: bool = True) -> Attack:
    def play(target: Target) -> Awaitable[Answer]:
        return many(target.api, [post(CHAT, question(urls()), target.attacker)] * times)

    return Attack(name, "tenant", play, refused=refused)


def question(urls: Sequence[str]) -> bytes:
    """A chat about the images at these URLs."""
    return _chat([{"type": "image_url", "image_url": {"url": url}} for url in urls])


def _chat(parts: Sequence[Any]) -> bytes:
    """A chat about images, 1,000 in each message."""
    messages = [
        {"role": "user", "content": [*parts[at : at + 1000], {"type": "text", "text": "the cat"}]}
        for at in range(0, len(parts), 1000)
    ]
    return json.dumps({"model": VISION, "messages": messages, "max_tokens": 4}).encode()


def _videos() -> Iterator[Attack]:
    yield _video("10,000 frames of a video", lambda: [picture()] * 10_000)
    yield _video("a video of 8 million commas", lambda: [b""] * 8_000_000)
    yield _video("a video of bombs", lambda: [bomb(12_000)] * 60)
    yield _video("frames of 60 sizes", lambda: [picture(8 + n, 8) for n in range(60)])
    # It is read, but has more tokens than the context.
    yield _video("60 frames of 4,096 x 4,096", lambda: [_deep_png()] * 60, refused=False)
    yield _video("a video that is an MP4", lambda: [b"\0\0\0\x18ftypmp42" + bytes(10_000)] * 2)


def _video(name: str, frames: Callable[[], Sequence[bytes]], *, refused: bool = True) -> Attack:
    def play(target: Target) -> Awaitable[Answer]:
        return many(target.api, [post(CHAT, _chat([video_part(*frames())]), target.attacker)])

    return Attack(name, "tenant", play, refused=refused)


def _one(encoded: Callable[[], bytes], kind: str = "png") -> Urls:
    return lambda: [data_url(encoded(), kind)]


def _gif_of_size(side: int) -> bytes:
    """A GIF whose header says this size."""
    return b"GIF89a" + side.to_bytes(2, "little") * 2 + picture(kind="GIF")[10:]


def _webp_of_size(side: int) -> bytes:
    """A lossless WebP whose header says this size."""
    out = io.BytesIO()
    Image.new("RGB", (16, 16)).save(out, "WEBP", lossless=True)
    encoded = out.getvalue()
    at = encoded.index(b"VP8L") + 9  # after the chunk's length and a signature: 14 bits each
    size = int.from_bytes(encoded[at : at + 4], "little") >> 28 << 28
    size |= (side - 1) << 14 | (side - 1)
    return encoded[:at] + size.to_bytes(4, "little") + encoded[at + 4 :]


@cache
def _deep_png() -> bytes:
    """As many pixels as are allowed, of 16 bits."""
    out = io.BytesIO()
    Image.new("I;16", (4096, 4096)).save(out, "PNG", compress_level=9)
    return out.getvalue()


def _bombs() -> Iterator[Attack]:
    yield _attack("a PNG that says 65,000 x 65,000", _one(lambda: png_of_size(65_000, 65_000)))
    yield _attack("a PNG of 12,000 x 12,000 equal pixels", _one(lambda: bomb(12_000)))
    yield _attack("a WebP that says 16,000 x 16,000", _one(lambda: _webp_of_size(16_000), "webp"))
    yield _attack("a GIF that says 65,535 x 65,535", _one(lambda: _gif_of_size(65_535), "gif"))
    yield _attack("a PNG with 64 MiB of compressed texts", _one(texts_png), refused=False)
    # Refused, unless the deadline comes first.
    yield _attack(
        "a JPEG with 20,000 scans", _one(lambda: slow_jpeg(20_000), "jpeg"), refused=False
    )
    # With the most pixels that are allowed: it is read, but has more tokens than the context.
    yield _attack("32 PNGs of 4,096 x 4,096", _one(_deep_png), times=32, refused=False)
    yield Attack("32 JPEGs with 20,000 scans", "tenant", _slow_images)


async def _slow_images(target: Target) -> Answer:
    """Sends images that take long to decode; meanwhile another tenant's must be read."""
    bodies = [question([data_url(slow_jpeg(20_000 + n), "jpeg")]) for n in range(32)]
    slow = many(target.api, [post(CHAT, body, target.attacker) for body in bodies])
    plain = post(CHAT, question([data_url(picture())]), target.bystander)
    found, beside = await asyncio.gather(slow, many(target.api, [plain]))
    return found if beside.outcome == "200" else Answer("500", beside.seconds)


def _files() -> Iterator[Attack]:
    for kind in KINDS:
        for share in (0.01, 0.5, 0.99):
            yield _attack(f"{share:.0%} of a {kind}", _cut(kind, share))
    others: dict[str, Callable[[], bytes]] = {
        "a TIFF": lambda: picture(kind="TIFF"),
        "a BMP": lambda: picture(kind="BMP"),
        "a PDF": lambda: picture(kind="PDF"),
        "an EPS": lambda: picture(kind="EPS"),
        "an SVG": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///"/></svg>',
        "7 MiB of zeros": lambda: bytes(5 * MIB),
        "nothing": lambda: b"",
    }
    for name, encoded in others.items():
        yield _attack(f"{name} in the place of a PNG", _one(encoded))


def _cut(kind: str, share: float) -> Urls:
    def urls() -> Sequence[str]:
        noise = Image.effect_noise((400, 300), 80).convert("RGB")
        out = io.BytesIO()
        noise.save(out, kind)
        encoded = out.getvalue()
        return [data_url(encoded[: int(len(encoded) * share)], kind.lower())]

    return urls


def _urls() -> Iterator[Attack]:
    whole = data_url(picture())
    yield _attack("10,000 images in a request", lambda: [whole] * 10_000)
    yield _attack("64 images of 100 KiB that are none", lambda: [data_url(bytes(75_000))] * 64)
    yield _attack(
        "7 MiB of base64 with a fault at its end", lambda: [whole[:22] + "A" * 7 * MIB + "?"]
    )
    yield _attack(
        "7 MiB before the comma of a data: URL", lambda: ["data:image/png" + ";a" * 3 * MIB]
    )
    yield _attack("7 MiB of blanks in base64", lambda: [whole + " " * 7 * MIB])
    yield _attack("a data: URL in a data: URL", lambda: [_nested(whole)])
    yield _attack("a data: URL of a type of text", lambda: ["data:text/html;base64,PGgxPg=="])
    yield _attack("a data: URL before a data: URL", lambda: [f"data:{whole}"])


def _nested(url: str) -> str:
    for _ in range(20):
        url = f"data:image/png;base64,{base64.b64encode(url.encode()).decode()}"
    return url


def _places() -> Iterator[Attack]:
    yield Attack(
        f"{len(INNER_HOSTS)} forms of this machine's address", "tenant", _inner, refused=True
    )
    yield _attack("the address of a cloud's metadata", lambda: ["http://169.254.169.254/latest"])
    yield _attack("a file's URL", lambda: ["file:///etc/passwd"])
    yield _attack("a URL of 7 MiB", lambda: ["http://localhost/" + "a" * 7 * MIB])


def _uploads() -> Iterator[Attack]:
    def upload(encoded: Callable[[], bytes], times: int) -> Callable[[Target], Awaitable[Answer]]:
        def play(target: Target) -> Awaitable[Answer]:
            body, headers = form(encoded(), "cat.png", "vision")
            return many(target.api, [post("/v1/files", body, target.attacker, headers)] * times)

        return play

    bombs: dict[str, Callable[[], bytes]] = {
        "a PNG that says 65,000 x 65,000": lambda: png_of_size(65_000, 65_000),
        "30 MiB that are no image": lambda: bytes(30 * MIB),
    }
    for name, encoded in bombs.items():
        yield Attack(f"16 uploads of {name}", "tenant", upload(encoded, 16))
    for times, count in ((20, 64), (1, 10_000)):
        parts = [{"type": "file", "file": {"file_id": f"file-{n}"}} for n in range(count)]
        name = f"{times} x {count:,} ids of files that do not exist"
        body = partial(_chat, parts)
        yield Attack(name, "tenant", ask(CHAT, body, times), refused=True)


async def _inner(target: Target) -> Answer:
    """Asks for a picture of a server of this machine, which must not be asked for it."""
    reached = 0

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal reached
        reached += 1
        writer.close()

    hosts = [f"[{host}]" if ":" in host else host for host in INNER_HOSTS]
    bodies = [question([f"http://{host}:{target.inner}/cat.png"]) for host in hosts]
    async with await asyncio.start_server(serve, None, target.inner):
        answer = await many(target.api, [post(CHAT, body, target.attacker) for body in bodies])
    return Answer("500", answer.seconds) if reached else answer
