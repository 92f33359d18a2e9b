"""Speculative decoding for the engine: proposes drafts before a step, learns from it afterwards."""

from ..core.config import EngineConfig
from ..core.request import Sequence
from ..core.speculative_config import SpeculativeConfig
from ..core.speculative_stats import SpeculationStats
from ..core.step_plan import NO_DRAFTS, Drafts, SchedulerOutput, StepResult
from .draft_proposer import Drafter, DraftModelProposer
from .head_proposer import DraftingHead, HeadProposer
from .lengths import DraftLengths
from .ngram import NgramProposer
from .proposer import Proposer
from .step_cost_model import StepCostModel


class Speculator:
    """Chooses the number of drafts, asks the proposer, and learns which drafts were accepted.

    It changes no token, only the number of steps.
    """

    def __init__(self, config: SpeculativeConfig, proposer: Proposer) -> None:
        self._costs = StepCostModel()
        self._draft_lengths = DraftLengths(
            config.num_speculative_tokens, self._costs, config.adaptive
        )
        self._proposer = proposer
        self._largest_batch = config.disable_by_batch_size
        self._prefilled = 0
        self._drafts = self._draft_tokens = 0
        self._accepted = [0] * config.num_speculative_tokens

    def propose(self, decoding: list[tuple[Sequence, int]]) -> Drafts:
        """Drafts for some of the decoding sequences, each given with the most drafts it can use."""
        if self._largest_batch is not None and len(decoding) > self._largest_batch:
            return NO_DRAFTS
        return self._proposer.propose(
            self._draft_lengths.choose(decoding, self._prefilled, self._proposer)
        )

    def observe(self, scheduler_output: SchedulerOutput, result: StepResult) -> None:
        """Learns from a step: its cost and its accepted drafts."""
        self._costs.observe(scheduler_output.num_tokens, result.seconds)
        sampled = iter(result.sampled)
        decoding = 0
        for item in scheduler_output.scheduled:
            tokens = next(sampled) if item.samples else None
            if item.length == 1:
                decoding += 1 + len(item.drafts)
            if item.drafts and tokens is not None:
                self._count(item.sequence, len(item.drafts), len(tokens) - 1)
        self._prefilled = scheduler_output.num_tokens - decoding

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            self._drafts, self._draft_tokens, sum(self._accepted), tuple(self._accepted)
        )

    def _count(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        self._draft_lengths.add(sequence, drafted, accepted)
        self._drafts += 1
        self._draft_tokens += drafted
        for place in range(accepted):
            self._accepted[place] += 1


def make_speculator(
    config: EngineConfig, draft_model: Drafter | None, draft_head: DraftingHead | None = None
) -> Speculator | None:
    """The configured speculator, or None. `draft_model` and `draft_head` are the runner's, if it
    has them."""
    speculation = config.speculative_config
    if speculation is None:
        return None
    if draft_head is not None:
        return Speculator(speculation, HeadProposer(draft_head))
    if draft_model is not None:
        proposer = DraftModelProposer(
            draft_model,
            config.max_num_batched_tokens,
            prefix_caching=config.enable_prefix_caching,
        )
        return Speculator(speculation, proposer)
    lookup = NgramProposer(speculation.prompt_lookup_min, speculation.prompt_lookup_max)
    return Speculator(speculation, lookup)
