"""The LoRA adapters that have running and waiting requests."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..core.request import State
from .sequence_group import SequenceGroup


@dataclass(frozen=True, slots=True)
class LoRAStats:
    """Adapter names in alphabetical order.

    At most `slots` adapters are running. An adapter is in both lists if some of its requests run
    and others wait.
    """

    slots: int
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


def lora_stats(slots: int, groups: Iterable[SequenceGroup]) -> LoRAStats:
    """Sorts the adapters of unfinished requests; another thread may change these meanwhile."""
    running: set[str] = set()
    waiting: set[str] = set()
    for group in groups:
        name = group.request.lora
        if name is not None:
            runs = any(each.state is State.RUNNING for each in list(group.sequences))
            (running if runs else waiting).add(name)
    return LoRAStats(slots, tuple(sorted(running)), tuple(sorted(waiting)))
