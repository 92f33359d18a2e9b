"""What speculative decoding says of itself after a step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Totals since the start, with vLLM's meaning.

    `drafts` are proposals of `draft_tokens` tokens in all, of which `accepted_tokens` were
    accepted: `accepted_per_position` says how often the first, the second and so on.
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]
