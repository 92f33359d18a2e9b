"""The scheduler's decision for one step and the runner's result, which are all that they
exchange."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

from .images import PromptImage
from .outputs import SampledToken, TokenLogprobs
from .request import Sequence

# Proposed next tokens of decoding sequences.
Drafts = Mapping[Sequence, tuple[int, ...]]
NO_DRAFTS: Drafts = MappingProxyType({})


class ScheduledSequence(NamedTuple):
    """A run of one sequence's known tokens, positions [start, start + length), and its drafts.

    Positions [0, start) have their KV; this step computes the run. If the run ends with the last
    known token, the step samples the next one (`samples`). `drafts` are proposals for the tokens
    after the run: they are computed at the following positions, and the token sampled after each of
    them decides whether the next one is accepted. The step also returns the log probabilities of
    `scores` prompt tokens: those that follow the first `scores` tokens of the run.
    """

    sequence: Sequence
    start: int
    length: int
    samples: bool
    drafts: tuple[int, ...] = ()
    scores: int = 0


class SampleRow(NamedTuple):
    """One row of logits: the next token of `sequence` after its known tokens and `ahead`.

    Penalties, random numbers and grammar masks of a row are functions of these fields. `known` is
    the number of the sequence's tokens that count, or None for all. It is set if tokens may be
    added while the step runs.
    """

    sequence: Sequence
    ahead: tuple[int, ...] = ()
    known: int | None = None

    @property
    def known_length(self) -> int:
        """The number of the sequence's tokens that count, prompt and output."""
        return len(self.sequence.token_ids) if self.known is None else self.known

    @property
    def output_length(self) -> int:
        """Number of output tokens before the sampled one."""
        return self.known_length - self.sequence.prompt_length + len(self.ahead)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output before the sampled token. The caller must not change the list."""
        known = self.sequence.token_ids
        if self.known is not None:
            known = known[: self.known]
        return [*known, *self.ahead] if self.ahead else known


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One ragged batch: decodes (one token) first, then decodes with drafts, then prefill chunks.

    `num_tokens` counts drafts too; `prefill_tokens` of them belong to prompts or are recomputed.
    Before the forward pass blocks are copied in this order: `swap_out` (device, host), `swap_in`
    (host, device), `copies` (source, destination) for copy-on-write. A block may be in both swaps.
    `zeroed` blocks held recurrent state and get KV now; they are zeroed before `copies`, since bits
    of a state may be infinite or NaN as KV.
    `saves` (device, host) may be copied while the step computes, which writes none of their blocks;
    they are complete with its result. A step without runs only has these copies.
    Before the forward pass the embeddings of the images `dropped` (digests) are freed, and then the
    images `encoded` are encoded; their embeddings are kept until they are dropped.
    `ahead` means that the result of the step before was not known yet, so runs may end with a
    PENDING token.
    """

    scheduled: tuple[ScheduledSequence, ...]
    copies: tuple[tuple[int, int], ...]
    num_tokens: int
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    prefill_tokens: int = 0
    ahead: bool = False
    zeroed: tuple[int, ...] = ()
    saves: tuple[tuple[int, int], ...] = ()
    encoded: tuple[PromptImage, ...] = ()
    dropped: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step. Entries are in the order of the scheduled sequences.

    `sampled` has the new tokens of each sequence with `samples`: the accepted drafts and the token
    after them. It is None for a sequence whose logits were NaN or infinite. `embeddings` replaces
    it for embedding models. `scored` has the prompt log probabilities of each sequence with
    `scores`. `seconds` is the time of the whole step, `swap_seconds` that of its copies to and from
    host memory, and `encode_seconds` that of its images; 0 means not measured.
    """

    sampled: tuple[tuple[SampledToken, ...] | None, ...]
    embeddings: tuple[bytes | None, ...] = ()
    seconds: float = 0.0
    swap_seconds: float = 0.0
    scored: tuple[tuple[TokenLogprobs, ...], ...] = ()
    encode_seconds: float = 0.0


class PendingStep(Protocol):
    """A submitted step."""

    def result(self) -> StepResult:
        """Waits for this step, not for later ones. Raises what the step raised."""
