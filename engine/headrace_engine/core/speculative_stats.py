"""Statistics of speculative decoding."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Totals since the start, as vLLM counts them.

    `drafts` counts proposals and `draft_tokens` their tokens, of which `accepted_tokens` were
    accepted. `accepted_per_position` counts accepted tokens by their place in the proposal.
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]
