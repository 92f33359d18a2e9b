"""All random choices of one attack, each by its name, so that an attack can be changed a little."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
# The share of random choices that a variant keeps.
_CHANGED = 0.3


@dataclass(frozen=True, slots=True)
class Dice:
    """`changes` are numbers, each of which changes some of the choices that are not `fixed`.

    Written `SEED/NUMBER+CHANGE+CHANGE`.
    """

    seed: int
    number: int
    changes: tuple[int, ...] = ()

    @staticmethod
    def read(text: str) -> "Dice":
        """Raises ValueError."""
        first, *changes = text.split("+")
        seed, number = first.split("/")
        return Dice(int(seed), int(number), tuple(map(int, changes)))

    def __str__(self) -> str:
        return "".join((f"{self.seed}/{self.number}", *(f"+{each}" for each in self.changes)))

    def rng(self, name: str, *, fixed: bool = False) -> random.Random:
        source = f"{self.seed}/{self.number}/{name}"
        for change in () if fixed else self.changes:
            if random.Random(f"{change}?{source}").random() < _CHANGED:
                source = f"{change}!{source}"
        return random.Random(source)

    def pick(self, name: str, options: Sequence[T], *, fixed: bool = False) -> T:
        return self.rng(name, fixed=fixed).choice(options)

    def size(self, name: str, least: int, most: int) -> int:
        """Chooses a number; all orders of magnitude are equally likely."""
        rng = self.rng(name)
        factor: float = (most / least) ** rng.random()
        return round(least * factor)
