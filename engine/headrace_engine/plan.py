"""The scheduler's decision for one step and the runner's answer: all that passes between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from .outputs import SampledToken, TokenLogprobs
from .request import Sequence

# Proposed next tokens of decoding sequences.
Drafts = Mapping[Sequence, tuple[int, ...]]
NO_DRAFTS: Drafts = MappingProxyType({})


class ScheduledSequence(NamedTuple):
    """A run of one sequence's known tokens, positions [start, start + length), and its drafts.

    The KV of positions [0, start) is in the sequence's blocks; this step computes the rest of the
    run and, where it ends with the last known token, samples the next one (`samples`). `drafts` are
    proposals for the tokens behind that: they are run at the positions that follow, and what is
    sampled behind each tells whether the next one holds. A tuple, as one is made for each sequence
    in each step. With `scores` the log probabilities of the prompt tokens behind the run's first
    so many are wanted too.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool
    drafts: tuple[int, ...] = ()
    scores: int = 0


class SampleRow(NamedTuple):
    """One row of logits: the next token of `sequence` if the tokens `ahead` follow those it knows.

    Whatever a row is sampled with (penalties, random numbers, grammar) is a function of this.
    `known` bounds the tokens of the sequence that count, where more may come while the step runs;
    None: all.
    """

    sequence: Sequence
    ahead: tuple[int, ...] = ()
    known: int | None = None

    @property
    def known_length(self) -> int:
        """Tokens of the sequence itself that count, prompt and output."""
        return len(self.sequence.token_ids) if self.known is None else self.known

    @property
    def output_length(self) -> int:
        """Output tokens before the one that is sampled."""
        return self.known_length - self.sequence.prompt_length + len(self.ahead)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output before the sampled token; not to be changed."""
        known = self.sequence.token_ids
        if self.known is not None:
            known = known[: self.known]
        return [*known, *self.ahead] if self.ahead else known


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One ragged batch: decodes (one token) first, then decodes with drafts, then prefill chunks.

    `num_tokens` counts drafts too. `copies` are (source, destination) blocks of copy-on-write,
    copied before the forward pass. Before those, `swap_out` copies (device, host) blocks to host
    memory, and then `swap_in` (host, device) blocks back: a block may be in both.
    `prefill_tokens` are those of `num_tokens` that are of prompts, or computed again. `ahead`: made
    before the result of the step before was known, so runs may end with a PENDING token.
    """

    scheduled: tuple[ScheduledSequence, ...]
    copies: tuple[tuple[int, int], ...]
    num_tokens: int
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    prefill_tokens: int = 0
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """The new tokens of each scheduled sequence with `samples`, in the plan's order.

    One without drafts; with drafts as many as were accepted, and the one sampled behind them.
    None where the model gave NaN or infinite logits: no token of that sequence can be trusted.
    `scored` are the log probabilities of prompts, for each scheduled sequence with `scores`.
    Of a model that embeds `embeddings` take their place, in the same order.
    `seconds` are those of the whole step and `swap_seconds` of its copies from and to host memory;
    0 where they were not measured.
    """

    sampled: tuple[tuple[SampledToken, ...] | None, ...]
    embeddings: tuple[bytes | None, ...] = ()
    seconds: float = 0.0
    swap_seconds: float = 0.0
    scored: tuple[tuple[TokenLogprobs, ...], ...] = ()


class PendingStep(Protocol):
    """A submitted step."""

    def result(self) -> StepResult:
        """Waits for the step, and for no later one. Raises what the step raised."""
