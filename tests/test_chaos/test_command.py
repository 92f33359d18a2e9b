"""The command line of the faults, and that its descriptions are right."""

import subprocess
import sys
from pathlib import Path

from headrace_testing.chaos.cases import Case, Expected
from headrace_testing.chaos.clients import Answer, Choice, problem
from headrace_testing.chaos.command import drawn_shards
from headrace_testing.chaos.faults import ELSEWHERE, FAULTS

ROOT = Path(__file__).resolve().parents[2]
CASE = Case("greedy", (5, 6), {}, (Expected((7, 8, 9), "length", "abc"),))


def test_every_fault_is_listed() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "tests.test_chaos", "--list"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout

    names = [line.split()[0] for line in listed.splitlines()]
    assert names == [*FAULTS, *ELSEWHERE]


def test_three_seeds_have_three_numbers_of_shards() -> None:
    drawn = [drawn_shards(seed) for seed in range(1, 31)]

    assert [sorted(drawn[at : at + 3]) for at in range(0, 30, 3)] == 10 * [[1, 2, 3]]


def test_faults_listed_as_tested_elsewhere_have_tests() -> None:
    files = [file.partition(":")[0] for _, files in ELSEWHERE.values() for file in files]

    assert [file for file in files if not (ROOT / "tests" / file).exists()] == []


def answer(tokens: tuple[int, ...], text: str = "abc", logprobs: int = 0) -> Answer:
    choice = Choice(list(tokens), text, "length", logprobs)
    return Answer({0: choice}, completion_tokens=3, done=True)


def test_an_answer_must_be_the_undisturbed_one() -> None:
    assert problem(CASE, answer((7, 8, 9))) is None


def test_lost_repeated_and_changed_tokens_are_detected() -> None:
    wrong = [
        answer((7, 8)),
        answer((7, 8, 8, 9)),
        answer((7, 6, 9)),
        answer((7, 8, 9), text="ab"),
        answer((7, 8, 9), logprobs=3),
        Answer(error="boom"),
        Answer({}, completion_tokens=3, done=True),
    ]

    assert [given for given in wrong if problem(CASE, given) is None] == []
