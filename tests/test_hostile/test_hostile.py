"""Attacks on running processes: none takes them down, and another tenant hardly notices."""

import pytest

from headrace_testing.hostile.attack import Attack
from headrace_testing.hostile.command import GENERATED
from headrace_testing.hostile.dice import Dice
from headrace_testing.hostile.generator import Generator
from headrace_testing.hostile.report import violations
from headrace_testing.hostile.rows import rows

from .conftest import Attacks
from .unrepaired import UNREPAIRED

pytestmark = [pytest.mark.hostile, pytest.mark.timeout(900)]

SEED = 1
TOGETHER = 25


def _is_repaired(attack: Attack) -> bool:
    return not attack.name.startswith(UNREPAIRED)


FOUND = [pytest.param(attack, id=attack.name) for attack in rows() if _is_repaired(attack)]


def test_the_list_of_what_is_unrepaired_is_no_longer_than_it_must_be(attacks: Attacks) -> None:
    generator = Generator(attacks.campaign.document)
    drawn = [generator.draw(Dice(SEED, number)) for number in range(GENERATED)]
    names = [attack.name for attack in (*rows(), *drawn)]
    assert [each for each in UNREPAIRED if not any(name.startswith(each) for name in names)] == []


@pytest.mark.parametrize("attack", FOUND)
def test_what_was_found_by_hand_does_no_harm(attack: Attack, attacks: Attacks) -> None:
    assert list(violations([attacks.strike(attack)])) == []


@pytest.mark.parametrize("first", range(0, GENERATED, TOGETHER))
def test_what_is_generated_does_no_harm(first: int, attacks: Attacks) -> None:
    generator = Generator(attacks.campaign.document)
    drawn = [generator.draw(Dice(SEED, number)) for number in range(first, first + TOGETHER)]
    results = [attacks.strike(attack) for attack in drawn if _is_repaired(attack)]
    assert list(violations(results)) == []


def test_the_other_tenant_had_its_latency_all_the_time(attacks: Attacks) -> None:
    assert attacks.latency.violations(attacks.campaign.undisturbed) == []
