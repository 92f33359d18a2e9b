"""The rule for a draft model's drafts, in virtual time: without a possible gain it costs next to
nothing, whatever the batch; with one it reaches it."""

import random
from dataclasses import dataclass, field

import pytest

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.outputs import SampledToken
from headrace_engine.core.request import EngineRequest, Sequence, State
from headrace_engine.core.speculative_config import SpeculativeConfig
from headrace_engine.core.step_plan import (
    NO_DRAFTS,
    Drafts,
    SampleRow,
    ScheduledSequence,
    SchedulerOutput,
    StepResult,
)
from headrace_engine.speculative.draft_proposer import DraftModelProposer
from headrace_engine.speculative.speculator import Speculator

PROMPT, OUTPUT, BUDGET = 256, 96, 2048
RIGHT, WRONG = 7, 8


def step_seconds(tokens: int) -> float:
    """The seconds of a step of a target that is bound by memory up to a few tokens, and by compute
    beyond."""
    return 1e-3 + max(1e-3, tokens * 0.13e-3) + tokens * 0.05e-3


@dataclass
class VirtualDrafter:
    """Takes `share` of the target's time; always predicts RIGHT."""

    share: float
    now: float = 0.0
    num_blocks: int = 4096
    block_size: int = 16
    vocab_size: int = 100
    max_model_len: int = 4096

    def execute(
        self, scheduler_output: SchedulerOutput, rows: tuple[SampleRow, ...]
    ) -> tuple[int | None, ...]:
        self.now += self.share * step_seconds(scheduler_output.num_tokens)
        return (RIGHT,) * len(rows)


@dataclass
class Simulation:
    """Requests of one length that begin and decode together; each drafted token is accepted with
    probability `chance`."""

    count: int
    chance: float
    share: float
    rounds: int = 1
    speculative: bool = True
    draws: random.Random = field(default_factory=lambda: random.Random(0))

    def seconds(self) -> float:
        drafter = VirtualDrafter(self.share)
        proposer = DraftModelProposer(drafter, BUDGET, clock=lambda: drafter.now)
        speculator = Speculator(SpeculativeConfig(method="draft_model", model="m"), proposer)
        for _ in range(self.rounds):
            self._serve(drafter, speculator)
        return drafter.now

    def _serve(self, drafter: VirtualDrafter, speculator: Speculator) -> None:
        live = [_sequence() for _ in range(self.count)]
        for begin in range(0, self.count, BUDGET // PROMPT):
            some = live[begin : begin + BUDGET // PROMPT]
            self._step(drafter, speculator, [(one, 0, PROMPT) for one in some], NO_DRAFTS)
        while live:
            decoding = [(one, _left(one) - 1) for one in live]
            drafts = speculator.propose(decoding) if self.speculative else NO_DRAFTS
            runs = [(one, len(one.token_ids) - 1, 1) for one in live]
            self._step(drafter, speculator, runs, drafts)
            for one in live:
                one.state = State.RUNNING if _left(one) > 0 else State.FINISHED
            live = [one for one in live if _left(one) > 0]

    def _step(
        self,
        drafter: VirtualDrafter,
        speculator: Speculator,
        runs: list[tuple[Sequence, int, int]],
        drafts: Drafts,
    ) -> None:
        scheduled = tuple(
            ScheduledSequence(one, start, length, samples=True, drafts=drafts.get(one, ()))
            for one, start, length in runs
        )
        tokens = sum(item.length + len(item.drafts) for item in scheduled)
        scheduler_output, seconds = SchedulerOutput(scheduled, (), tokens), step_seconds(tokens)
        drafter.now += seconds
        sampled = tuple(self._sample(item) for item in scheduled)
        speculator.observe(scheduler_output, StepResult(sampled, seconds=seconds))

    def _sample(self, item: ScheduledSequence) -> tuple[SampledToken, ...]:
        held = 0
        while held < len(item.drafts) and self.draws.random() < self.chance:
            held += 1
        tokens = (RIGHT,) * held + (WRONG,)
        item.sequence.token_ids.extend(tokens)
        return tuple(map(SampledToken, tokens))


def _sequence() -> Sequence:
    prompt = (1,) * PROMPT
    params = SamplingParams(max_tokens=OUTPUT)
    request = EngineRequest(request_id="r", prompt_token_ids=prompt, params=params, seed=0)
    return Sequence(request, 0, list(prompt))


def _left(sequence: Sequence) -> int:
    return PROMPT + OUTPUT - len(sequence.token_ids)


def ratio(count: int, chance: float, share: float, rounds: int = 1) -> float:
    """The time with drafts, relative to the time without."""
    plain = Simulation(count, chance, share, rounds, speculative=False).seconds()
    return Simulation(count, chance, share, rounds).seconds() / plain


@pytest.mark.parametrize("count", [8, 32])
@pytest.mark.parametrize("chance", [0.0, 0.7])
def test_without_a_gain_only_the_trial_costs_time(count: int, chance: float) -> None:
    assert ratio(count, chance, share=0.5) < 1.05
    assert ratio(count, chance, share=0.5, rounds=4) < 1.02


@pytest.mark.parametrize(("count", "most"), [(1, 0.55), (2, 0.7), (4, 0.9)])
def test_drafts_are_made_where_they_save_time(count: int, most: float) -> None:
    assert ratio(count, chance=0.9, share=0.1, rounds=2) < most
