"""Which adapters run and which are waited for, for whoever looks from outside."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..group import Group
from ..request import State


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """Names in alphabetical order; of `running` there are at most `slots`. An adapter may be in
    both: some of its requests run and others wait."""

    slots: int
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


def adapter_use(slots: int, groups: Iterable[Group]) -> AdapterUse:
    """Of unfinished requests; another thread may change them meanwhile."""
    running: set[str] = set()
    waiting: set[str] = set()
    for group in groups:
        name = group.request.lora
        if name is not None:
            runs = any(each.state is State.RUNNING for each in list(group.sequences))
            (running if runs else waiting).add(name)
    return AdapterUse(slots, tuple(sorted(running)), tuple(sorted(waiting)))
