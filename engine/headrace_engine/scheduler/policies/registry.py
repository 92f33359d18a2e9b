"""Finds policies by name, and users' own policies by `module:Class`."""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from time import monotonic

from ...core.errors import ConfigError
from .base import Policy
from .deadline import Deadline
from .fair import Fair
from .fcfs import Fcfs
from .priority import Priority
from .sjf import ShortestJobFirst

BUILT_IN: tuple[type[Policy], ...] = (Fcfs, Priority, ShortestJobFirst, Fair, Deadline)
POLICIES: Mapping[str, type[Policy]] = {policy.name: policy for policy in BUILT_IN}

# Arguments of constructors that are objects, so that no option can set them.
SET_IN_CODE = frozenset({"clock", "predictor"})


def make_policy(
    name: str, options: Mapping[str, object] | None = None, clock: Callable[[], float] = monotonic
) -> Policy:
    """Makes the policy called `name` (or `module:Class`) with `options` as constructor arguments.

    `clock` is passed to policies that take one. Raises ConfigError naming what is wrong.
    """
    policy = POLICIES.get(name) or _load(name)
    arguments = dict(options or {})
    known = set(inspect.signature(policy).parameters)
    options_of = known - SET_IN_CODE
    unknown = sorted(set(arguments) - options_of)
    if unknown:
        choices = ", ".join(sorted(options_of)) or "none"
        raise ConfigError(f"policy_options: {name} has no option {unknown[0]}; it has: {choices}")
    if "clock" in known:
        arguments["clock"] = clock
    try:
        return policy(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"policy_options: {name} cannot be made: {error}") from error


def _load(name: str) -> type[Policy]:
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(
            f"policy {name!r:.60} is unknown: choose {', '.join(POLICIES)} or module:Class"
        )
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"policy {name!r:.60} cannot be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ConfigError(f"policy {name!r:.60} must be a subclass of headrace_engine's Policy")
    return found
