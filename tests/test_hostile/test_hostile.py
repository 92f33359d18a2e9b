"""Attacks on running processes: none crashes them, and another tenant hardly notices."""

import pytest

from headrace_testing.hostile.attack import Attack
from headrace_testing.hostile.command import GENERATED, known
from headrace_testing.hostile.dice import Dice
from headrace_testing.hostile.generator import Generator
from headrace_testing.hostile.report import violations

from .conftest import Attacks

pytestmark = [pytest.mark.hostile, pytest.mark.timeout(900)]

SEED = 1
TOGETHER = 25


FOUND = [pytest.param(attack, id=attack.name) for attack in known()]


@pytest.mark.parametrize("attack", FOUND)
def test_known_attacks_do_no_harm(attack: Attack, attacks: Attacks) -> None:
    assert list(violations([attacks.strike(attack)])) == []


@pytest.mark.parametrize("first", range(0, GENERATED, TOGETHER))
def test_generated_attacks_do_no_harm(first: int, attacks: Attacks) -> None:
    generator = Generator(attacks.campaign.document)
    drawn = [generator.draw(Dice(SEED, number)) for number in range(first, first + TOGETHER)]
    results = [attacks.strike(attack) for attack in drawn]
    assert list(violations(results)) == []


def test_the_other_tenants_latency_stayed_within_bounds(attacks: Attacks) -> None:
    assert attacks.latency.violations(attacks.campaign.undisturbed) == []
