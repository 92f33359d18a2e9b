"""Checks the values of `policy_options`."""

import math
from numbers import Real

from ...core.errors import ConfigError


def number(name: str, value: object) -> float:
    """A finite number of at least 0. Raises ConfigError."""
    valid = isinstance(value, Real) and not isinstance(value, bool)
    if not valid or not 0 <= float(value) < math.inf:  # type: ignore[arg-type]  # a Real by then
        raise ConfigError(f"policy_options: {name} must be a number from 0 up, not {value!r:.60}")
    return float(value)  # type: ignore[arg-type]  # a Real by then


def above_zero(name: str, value: object) -> float:
    """A finite number above 0. Raises ConfigError."""
    if not (checked := number(name, value)):
        raise ConfigError(f"policy_options: {name} must be above 0, not {value!r:.60}")
    return checked
