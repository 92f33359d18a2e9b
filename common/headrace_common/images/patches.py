"""Sizes of images and videos that become whole patches, for the families of Qwen-VL and GLM-V."""

import math
from collections.abc import Mapping
from typing import Any

from .layout import ImageError

MAX_ASPECT_RATIO = 200
_BOUNDS = ("min_pixels", "max_pixels")


def whole_patches(
    width: int,
    height: int,
    side: int,
    pixels: tuple[int, int],
    *,
    frames: int = 1,
    counted: int | None = None,
) -> tuple[int, int]:
    """Width and height that an image, or each of `frames`, is resized to. Raises ImageError.

    Both are multiples of a token's `side`, the ratio stays nearly the same, and `counted` frames,
    or else all, have from the first to the second number of `pixels` together. Rounds as
    transformers does (halves to even numbers).
    """
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise ImageError(
            f"{width} x {height} pixels: one side is over {MAX_ASPECT_RATIO} times as long as the "
            "other"
        )
    least, most = pixels
    wide, high = round(width / side) * side, round(height / side) * side
    total = (counted or frames) * wide * high
    if total > most:
        shrink = math.sqrt(frames * height * width / most)
        wide = max(side, math.floor(width / shrink / side) * side)
        high = max(side, math.floor(height / shrink / side) * side)
    elif total < least:
        grow = math.sqrt(least / (frames * height * width))
        wide = math.ceil(width * grow / side) * side
        high = math.ceil(height * grow / side) * side
    return wide, high


def enlarged(width: int, height: int, side: int) -> tuple[int, int]:
    """Width and height with no side below `side`."""
    if min(width, height) >= side:
        return width, height
    scale = max(side / height, side / width)
    return int(width * scale), int(height * scale)


def read_numbers(processor: Mapping[str, Any], frames: str) -> dict[str, Any]:
    """The numbers that a processor's configuration gives; `frames` is the name of that of frames
    that are read together."""
    size = processor.get("size") or {}
    given = {
        frames: processor.get("temporal_patch_size"),
        "patch_size": processor.get("patch_size"),
        "merge": processor.get("merge_size"),
        "min_pixels": size.get("shortest_edge"),
        "max_pixels": size.get("longest_edge"),
    }
    return {name: int(value) for name, value in given.items() if value}


def qwen_numbers(processor: Mapping[str, Any], frames: str) -> dict[str, Any]:
    """The same for Qwen-VL, whose older files have other names for the bounds of pixels."""
    older = {name: int(processor[name]) for name in _BOUNDS if processor.get(name)}
    return read_numbers(processor, frames) | older
