"""The command line of the attacks: those found by hand, and those that a generator draws."""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .attack import Attack
from .campaign import Campaign, campaign
from .dice import Dice
from .generator import Generator
from .image_attacks import image_attacks
from .report import PROGRAM, line, summary, violations
from .rows import rows
from .verdict import Result

GENERATED = 300
# While drawing new attacks, this share of the attacks are variants of the most expensive ones so
# far.
_CHANGES = 0.4
_DEAREST = 12


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    options = _parser().parse_args(arguments)
    if options.list:
        _print([attack.name for attack in known()])
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="headrace-hostile-"))
    with campaign(folder) as made:
        results: list[Result] = []
        try:
            for attack in _plan(options, made, results):
                results.append(made.strike(attack))
                _print([line(results[-1]), *violations(results[-1:])])
        except KeyboardInterrupt:
            _print(["stopped"])
        latency = made.latency()
        _print(["", *summary(results, made.undisturbed, latency, folder)])
        bad = any(result.violations for result in results)
        return 1 if bad or latency.violations(made.undisturbed) else 0


def known() -> list[Attack]:
    """The attacks that were found by hand."""
    return [*rows(), *image_attacks()]


def _plan(
    options: argparse.Namespace, made: Campaign, results: Sequence[Result]
) -> Iterator[Attack]:
    generator = Generator(made.document)
    if options.attack:
        for name in options.attack:
            yield find(name, generator)
    elif options.minutes is None:
        if not options.only_generated:
            yield from known()
        for number in range(options.count):
            yield generator.draw(Dice(options.seed, number))
    else:
        yield from hunt(options.seed, 60 * options.minutes, generator, results)


def find(name: str, generator: Generator) -> Attack:
    """The attack with this name. Raises SystemExit if there is none."""
    if name[:1].isdigit() and "/" in name.partition(" ")[0]:
        return generator.draw(Dice.read(name.partition(" ")[0]))
    for attack in known():
        if attack.name == name:
            return attack
    raise SystemExit(f"{PROGRAM}: no attack {name!r}; --list prints the names")


def hunt(
    seed: int, seconds: float, generator: Generator, results: Sequence[Result]
) -> Iterator[Attack]:
    """Draws new attacks and variants of expensive ones until the time is over."""
    ends = time.monotonic() + seconds
    rng = random.Random(seed)
    drawn: dict[str, Dice] = {}
    number = 0
    while time.monotonic() < ends:
        dice = Dice(seed, number)
        dear = [
            each for each in sorted(results, key=_price)[-_DEAREST:] if each.attack.name in drawn
        ]
        if dear and rng.random() < _CHANGES:
            parent = drawn[rng.choice(dear).attack.name]
            dice = Dice(parent.seed, parent.number, (*parent.changes, rng.randrange(10**6)))
        else:
            number += 1
        attack = generator.draw(dice)
        drawn[attack.name] = dice
        yield attack


def _price(result: Result) -> float:
    """The cost to the gateway; waiting for a slow client costs nothing."""
    waited = result.answer.outcome in ("408", "left")
    seconds = 0.0 if waited else result.answer.seconds
    return 2 * result.work + seconds / 4 + result.stall


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROGRAM, description="Attack running Headrace processes.")
    parser.add_argument("--list", action="store_true", help="print the attacks found by hand")
    parser.add_argument("--attack", action="append", help="only this one, by name or SEED/NUMBER")
    parser.add_argument("--seed", type=int, default=1, help="seed of the generated attacks")
    parser.add_argument("--count", type=int, default=GENERATED, help="number of generated attacks")
    parser.add_argument("--only-generated", action="store_true", help="not those found by hand")
    parser.add_argument(
        "--minutes", type=float, help="instead look for expensive attacks this long"
    )
    return parser


def _print(lines: Sequence[str] | Iterator[str]) -> None:
    for each in lines:
        sys.stdout.write(each.encode("ascii", "backslashreplace").decode() + "\n")
    sys.stdout.flush()
