"""Pictures, hostile ones too, and a checkpoint of a model that reads pictures."""

import base64
import io
import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import AddedToken

from headrace_gateway.images.fetching import Fetcher
from headrace_gateway.images.intake import ImageIntake, ImageLimits
from headrace_gateway.images.uploads import UploadedImages
from headrace_gateway.telemetry.metrics import ImageResult

from .tokenizers import byte_level_tokenizer, write_checkpoint

IMAGE_TOKEN, VIDEO_TOKEN = "<|image_pad|>", "<|video_pad|>"
VISION_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% elif part.type == 'video' %}"
    "{{ '<|vision_start|><|video_pad|><|vision_end|>' }}{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PROCESSOR: Mapping[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "merge_size": 2,
    "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 64,
}
KINDS = ("PNG", "JPEG", "WEBP", "GIF")


def picture(width: int = 56, height: int = 56, kind: str = "PNG", shade: int = 90) -> bytes:
    """An encoded picture of one colour; another `shade` makes other bytes."""
    out = io.BytesIO()
    Image.new("RGB", (width, height), (shade, 40, 10)).save(out, kind)
    return out.getvalue()


def data_url(encoded: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(encoded).decode()}"


def image_part(encoded: bytes, **fields: Any) -> dict[str, Any]:
    """A picture as a part of a chat's message."""
    return {"type": "image_url", "image_url": {"url": data_url(encoded), **fields}}


def video_part(*frames: bytes) -> dict[str, Any]:
    """A video as a part of a chat's message."""
    encoded = ",".join(base64.b64encode(frame).decode() for frame in frames)
    return {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{encoded}"}}


def _ignore(_result: ImageResult) -> None:
    """Reports to no test."""


def image_intake(report: Callable[[ImageResult], None] = _ignore, **limits: int) -> ImageIntake:
    """An intake that fetches nothing and has no files. Close it if it has read images."""
    usual = {
        "images": 8,
        "image_bytes": 200_000,
        "pixels": 1_000_000,
        "held_bytes": 2**20,
        "workers": 2,
    }
    return ImageIntake(
        ImageLimits(**{**usual, **limits}), Fetcher((), 1), UploadedImages(None), report
    )


def png_of_size(width: int, height: int) -> bytes:
    """A PNG whose header says this size, with a few bytes of pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")]
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def bomb(side: int = 4000) -> bytes:
    """A small PNG that has `side` times `side` equal pixels."""
    out = io.BytesIO()
    Image.new("L", (side, side)).save(out, "PNG", compress_level=9)
    return out.getvalue()


def slow_jpeg(scans: int = 4000, side: int = 2048) -> bytes:
    """A progressive JPEG whose last scan is repeated: a few bytes each, and a pass over all
    coefficients."""
    out = io.BytesIO()
    Image.new("L", (side, side)).save(out, "JPEG", progressive=True)
    plain = out.getvalue()
    last = plain.rindex(b"\xff\xda")
    return plain[:last] + plain[last:-2] * scans + plain[-2:]


def texts_png(texts: int = 64, size: int = 2**20) -> bytes:
    """A PNG with as many compressed texts of `size` characters each."""
    plain = picture()
    text = b"a\0\0" + zlib.compress(b"a" * size, 9)
    chunk = struct.pack(">I", len(text)) + b"zTXt" + text
    chunk += struct.pack(">I", zlib.crc32(b"zTXt" + text))
    head = 8 + 25  # the signature and IHDR
    return plain[:head] + chunk * texts + plain[head:]


def write_vision_checkpoint(
    folder: Path,
    processor: Mapping[str, Any] = PROCESSOR,
    videos: Mapping[str, Any] | None = None,
    family: str | None = None,
    chat_template: str = VISION_TEMPLATE,
    tokens: Sequence[str] = (),
) -> Path:
    """What a gateway reads of a model in the form of Qwen2.5-VL without videos, or, with a video
    processor, of Qwen3-VL, or of another family. `tokens` are further special ones. Writes no
    weights."""
    backend = byte_level_tokenizer()
    names = ("<|vision_start|>", "<|vision_end|>", IMAGE_TOKEN, VIDEO_TOKEN, *tokens)
    backend.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in names])
    config = {
        "model_type": family or ("qwen2_5_vl" if videos is None else "qwen3_vl"),
        "image_token_id": backend.token_to_id("<image>" if "<image>" in tokens else IMAGE_TOKEN),
        "vocab_size": 512,
        "max_position_embeddings": 4096,
    }
    if videos is not None:
        token = "<video>" if "<video>" in tokens else VIDEO_TOKEN
        config["video_token_id"] = backend.token_to_id(token)
    write_checkpoint(
        folder, backend, chat_template=chat_template, config=config, eos_token="<|im_end|>"
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(dict(processor)))
    if videos is not None:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(dict(videos)))
    return folder
