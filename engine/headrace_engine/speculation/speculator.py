"""Speculative decoding as the engine sees it: drafts before a step, their fate after it."""

from ..config import EngineConfig
from ..plan import NO_DRAFTS, Drafts, StepPlan, StepResult
from ..request import Sequence
from .config import SpeculativeConfig
from .costs import StepCosts
from .draft_proposer import Drafter, DraftModelProposer
from .lengths import Lengths
from .ngram import NgramProposer
from .proposer import Proposer
from .stats import SpeculationStats


class Speculator:
    """Chooses lengths, asks the proposer, and learns from what the target made of it.

    Changes no token, only how many steps they take.
    """

    def __init__(self, config: SpeculativeConfig, proposer: Proposer) -> None:
        self._costs = StepCosts()
        self._lengths = Lengths(config.num_speculative_tokens, self._costs, config.adaptive)
        self._proposer = proposer
        self._largest_batch = config.disable_by_batch_size
        self._prefilled = 0
        self._drafts = self._draft_tokens = 0
        self._accepted = [0] * config.num_speculative_tokens

    def propose(self, decoding: list[tuple[Sequence, int]]) -> Drafts:
        """Drafts for some of the decoding sequences, each given with the most it can use."""
        if self._largest_batch is not None and len(decoding) > self._largest_batch:
            return NO_DRAFTS
        return self._proposer.propose(
            self._lengths.choose(decoding, self._prefilled, self._proposer)
        )

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Takes note of a step."""
        self._costs.observe(plan.num_tokens, result.seconds)
        sampled = iter(result.sampled)
        decoding = 0
        for item in plan.scheduled:
            tokens = next(sampled) if item.samples else None
            if item.length == 1:
                decoding += 1 + len(item.drafts)
            if item.drafts and tokens is not None:
                self._count(item.sequence, len(item.drafts), len(tokens) - 1)
        self._prefilled = plan.num_tokens - decoding

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            self._drafts, self._draft_tokens, sum(self._accepted), tuple(self._accepted)
        )

    def _count(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        self._lengths.add(sequence, drafted, accepted)
        self._drafts += 1
        self._draft_tokens += drafted
        for place in range(accepted):
            self._accepted[place] += 1


def make_speculator(config: EngineConfig, draft_model: Drafter | None) -> Speculator | None:
    """The one that a configuration asks for; `draft_model` is the runner's, if it has one."""
    speculation = config.speculative_config
    if speculation is None:
        return None
    if draft_model is not None:
        proposer = DraftModelProposer(
            draft_model,
            config.max_num_batched_tokens,
            prefix_caching=config.enable_prefix_caching,
        )
        return Speculator(speculation, proposer)
    lookup = NgramProposer(speculation.prompt_lookup_min, speculation.prompt_lookup_max)
    return Speculator(speculation, lookup)
