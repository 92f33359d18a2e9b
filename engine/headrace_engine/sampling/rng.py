"""Uniform random numbers that depend only on (seed, choice, output position).

They are counter-based, so no state moves with a request: any engine has the same number, in any
batch and after any preemption. Mixing is SplitMix64's finaliser (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", 2014), applied for each of the three values.
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_MASK = 2**64 - 1


def uniforms(seeds: list[int], choices: list[int], positions: list[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each row, with 53 random bits. Seeds may be negative."""
    state = _mix(_words(seeds))
    for counter in (choices, positions):
        state = _mix(state ^ _words(counter))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _words(values: list[int]) -> Words:
    return np.array([value & _MASK for value in values], dtype=np.uint64)


def _mix(state: Words) -> Words:
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    mixed: Words = state ^ (state >> np.uint64(31))
    return mixed
