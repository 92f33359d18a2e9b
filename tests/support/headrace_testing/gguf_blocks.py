"""Packs floats into the K-quants of ggml, block by block, after the description of the blocks.

The library gguf reads these types and does not write them. Each packer rounds to the nearest value
that its blocks can hold, which is all that tests need; llama.cpp searches for better scales.
"""

from collections.abc import Callable

import numpy as np

BLOCK = 256


def _halves(values: np.ndarray) -> np.ndarray:
    """float16 [n] as bytes [n, 2]."""
    return np.ascontiguousarray(values.astype("<f2")).view(np.uint8).reshape(-1, 2)


def _blocks(rows: np.ndarray, parts: int) -> np.ndarray:
    return rows.reshape(-1, parts, BLOCK // parts)


def _divide(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.divide(values, by, out=np.zeros_like(values), where=by != 0)
    return found


def _affine(rows: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Numbers up to `top` in eight groups of 32, their packed 6-bit scales and minima, and the
    scales of those: x = d * scale * number - dmin * minimum."""
    groups = _blocks(rows, 8)
    low = np.minimum(groups.min(axis=2), 0)
    wanted = (groups.max(axis=2) - low) / top
    d, dmin = wanted.max(axis=1) / 63, -low.min(axis=1) / 63
    d, dmin = (each.astype(np.float16).astype(np.float64) for each in (d, dmin))
    scales = np.clip(np.round(_divide(wanted, np.broadcast_to(d[:, None], wanted.shape))), 0, 63)
    minima = np.clip(np.round(_divide(-low, np.broadcast_to(dmin[:, None], low.shape))), 0, 63)
    step = np.broadcast_to((d[:, None] * scales)[..., None], groups.shape)
    shifted = groups + (dmin[:, None] * minima)[..., None]
    numbers = np.clip(np.round(_divide(shifted, step)), 0, top).astype(np.uint8)
    return numbers, _six_bits(scales.astype(np.uint8), minima.astype(np.uint8)), d, dmin


def _six_bits(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Eight scales and eight minima of 6 bits in 12 bytes."""
    first, second = slice(0, 4), slice(4, 8)
    return np.concatenate(
        [
            scales[:, first] | ((scales[:, second] >> 4) << 6),
            minima[:, first] | ((minima[:, second] >> 4) << 6),
            (scales[:, second] & 15) | ((minima[:, second] & 15) << 4),
        ],
        axis=1,
    )


def _pairs(numbers: np.ndarray) -> np.ndarray:
    """The low 4 bits of groups 0 and 1, 2 and 3, ... in the halves of the same bytes."""
    low = numbers & 15
    return (low[:, 0::2] | (low[:, 1::2] << 4)).reshape(len(numbers), -1)


def q4_k(rows: np.ndarray) -> np.ndarray:
    numbers, scales, d, dmin = _affine(rows, 15)
    found = np.concatenate([_halves(d), _halves(dmin), scales, _pairs(numbers)], axis=1)
    return found.reshape(len(rows), -1)


def q5_k(rows: np.ndarray) -> np.ndarray:
    numbers, scales, d, dmin = _affine(rows, 31)
    high = np.zeros((len(numbers), 32), dtype=np.uint8)
    for group in range(8):
        high |= (numbers[:, group] >> 4) << group
    found = np.concatenate([_halves(d), _halves(dmin), scales, high, _pairs(numbers)], axis=1)
    return found.reshape(len(rows), -1)


def q6_k(rows: np.ndarray) -> np.ndarray:
    groups = _blocks(rows, 16)
    wanted = np.abs(groups).max(axis=2) / 31
    d = (wanted.max(axis=1) / 127).astype(np.float16).astype(np.float64)
    scales = np.round(_divide(wanted, np.broadcast_to(d[:, None], wanted.shape)))
    step = np.broadcast_to((d[:, None] * scales)[..., None], groups.shape)
    numbers = (np.clip(np.round(_divide(groups, step)), -32, 31) + 32).astype(np.uint8)
    # Two halves of 128 numbers, each of four runs of 32.
    runs = numbers.reshape(-1, 2, 4, 32)
    low = np.concatenate(
        [
            (runs[:, :, 0] & 15) | ((runs[:, :, 2] & 15) << 4),
            (runs[:, :, 1] & 15) | ((runs[:, :, 3] & 15) << 4),
        ],
        axis=2,
    )
    high = sum((runs[:, :, run] >> 4) << (2 * run) for run in range(4))
    found = np.concatenate(
        [
            low.reshape(len(runs), -1),
            np.asarray(high, dtype=np.uint8).reshape(len(runs), -1),
            scales.astype(np.int8).view(np.uint8),
            _halves(d),
        ],
        axis=1,
    )
    return found.reshape(len(rows), -1)


PACKERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
