"""The definition of harm, and the repetition of an attack."""

import pytest

from headrace_testing.hostile.attack import Answer, Attack
from headrace_testing.hostile.dice import Dice
from headrace_testing.hostile.document import Document
from headrace_testing.hostile.generator import Generator
from headrace_testing.hostile.limits import MIB
from headrace_testing.hostile.report import repeat
from headrace_testing.hostile.rows import rows
from headrace_testing.hostile.verdict import Latency, Result, judge
from headrace_testing.hostile.watch import Event
from headrace_testing.hostile.world import Target, Watched

GATEWAY = Watched("gateway", 1, 1024 * MIB)
WELL = Answer("400", 0.1)
BODY = {"type": "object", "properties": {"prompt": {"type": "string"}, "n": {"type": "integer"}}}
DOCUMENT = {
    "components": {"schemas": {"Body": BODY}},
    "paths": {
        "/v1/completions": {
            "post": {
                "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/c/Body"}}}}
            }
        }
    },
}


async def _play(target: Target) -> Answer:
    return WELL


def verdict(
    *events: Event, answer: Answer = WELL, dead: tuple[str, ...] = (), settled: bool = True
) -> Result:
    attack = Attack("an attack", "tenant", _play)
    return judge(attack, answer, events, [GATEWAY], dead, settled, ended=20.0)


def test_an_attack_that_is_answered_and_costs_little_does_no_harm() -> None:
    seen = verdict(
        Event("memory", "gateway", 1.0, value=500 * MIB),
        Event("probe", "gateway", 1.0, 0.9),
        Event("gap", "stream", 1.0, 0.9),
    )
    assert seen.violations == () and seen.memory == {"gateway": 500 * MIB} and seen.stall == 0.9


@pytest.mark.parametrize(
    ("seen", "violation"),
    [
        (verdict(dead=("gateway-1",)), "gateway-1 died"),
        (verdict(Event("memory", "gateway", 1.0, value=513 * MIB)), "gateway 513 of 512 MiB"),
        (verdict(Event("probe", "gateway", 1.0, 1.0, value=0)), "liveness of gateway failed"),
        (verdict(Event("light", "models", 1.0, 1.1)), "waited 1.1 s"),
        (verdict(Event("gap", "stream", 1.0, 3.0)), "waited 3.0 s"),
        (verdict(Event("error", "ValueError broke off", 1.0, value=0)), "broke off"),
        (verdict(settled=False), "not served again"),
        (verdict(answer=Answer("none", 12.0)), "no answer in 10 s"),
        (verdict(answer=Answer("200", 10.5)), "no answer in 10 s"),
        (verdict(answer=Answer("500", 0.1)), "an answer of 500"),
    ],
)
def test_harm_is_reported(seen: Result, violation: str) -> None:
    assert len(seen.violations) == 1 and violation in seen.violations[0]


def test_an_attack_that_must_be_refused_is_not_answered_otherwise() -> None:
    attack = Attack("an attack", "tenant", _play, refused=True)
    outcomes = {
        outcome: judge(attack, Answer(outcome, 0.1), [], [], (), True, ended=20.0).violations
        for outcome in ("400", "429", "200", "503")
    }
    assert {outcome for outcome, found in outcomes.items() if not found} == {"400", "429"}


def test_time_without_a_processor_is_not_counted_as_harm() -> None:
    waited = [Event("waited", "gateway", at, value=total) for at, total in ((1.0, 0), (3.0, 10**9))]
    seen = verdict(*waited, Event("light", "models", 1.0, 2.0))
    assert seen.violations == () and seen.stall == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("waits", "harm"),
    [
        ({"gateway": (0, 1), "engine 7": (0, 1)}, True),  # at once
        ({"gateway": (0, 1), "engine 7": (4, 5)}, False),  # one after the other
        ({"gateway": (0, 3)}, False),
        ({}, True),
    ],
)
def test_an_answer_is_not_late_while_others_use_the_processors(
    waits: dict[str, tuple[int, int]], harm: bool
) -> None:
    events = [
        Event("waited", name, 8.5 + at, value=max(0, min(at, last) - first) * 10**9)
        for name, (first, last) in waits.items()
        for at in range(12)
    ]
    assert bool(verdict(*events, answer=Answer("200", 11.5)).violations) is harm


def test_p99_may_double() -> None:
    before = Latency(gap=1.0, first=1.0)
    assert Latency(gap=2.2, first=2.2).violations(before) == []
    assert len(Latency(gap=2.3, first=2.3).violations(before)) == 2


def test_a_seed_and_a_number_always_give_the_same_attack() -> None:
    generators = [Generator(Document(DOCUMENT)) for _ in range(2)]
    names = [[made.draw(Dice(7, n)).name for n in range(40)] for made in generators]
    assert names[0] == names[1] and len(set(names[0])) == 40


def test_a_changed_attack_keeps_its_kind_and_has_a_name() -> None:
    changed = Dice(7, 3, (5, 9))
    assert Dice.read(str(changed)) == changed
    drawn = [Dice(7, 3, (change,)) for change in range(20)]
    assert len({dice.pick("kind", range(1000), fixed=True) for dice in drawn}) == 1
    assert len({dice.pick("size", range(1000)) for dice in drawn}) > 3


def test_the_command_that_repeats_an_attack_names_it() -> None:
    drawn = Generator(Document(DOCUMENT)).draw(Dice(7, 3))
    assert repeat(Result(drawn, WELL, {}, 0.0, 0.0)).endswith('--attack "7/3"')
    found = rows()[0]
    assert repeat(Result(found, WELL, {}, 0.0, 0.0)).endswith(f'--attack "{found.name}"')


def test_every_field_of_the_document_is_attacked() -> None:
    document = Document(DOCUMENT)
    assert {str(place) for place in document.places} == {
        "/v1/completions the body",
        "/v1/completions prompt",
        "/v1/completions n",
    }
    bodies = [document.body(place, b"NaN") for place in document.places]
    assert bodies[0] == b"NaN" and b'"prompt": NaN' in bodies[1] and b'"n": NaN' in bodies[2]
