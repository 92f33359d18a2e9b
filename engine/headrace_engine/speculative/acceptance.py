"""Decides which drafts are accepted, from the tokens that the sampler chose after each of them.

The sampler takes each position's token from the target's distribution, with that position's random
number. A draft is accepted if it is the token sampled there. The first token that differs replaces
its draft, and what was computed after it is dropped. So the output is token for token the one
without speculation, for any proposer. With a proposer that ignores the random number this is the
rejection sampling of Leviathan et al. ("Fast inference from transformers via speculative decoding",
2023); with one that samples with the same number it is the coupling of Daliri et al. ("Coupling
without communication and drafter-invariant speculative decoding", 2024).
"""

from ..core.outputs import SampledToken

Chosen = tuple[SampledToken | None, ...]


def accept(drafts: tuple[int, ...], chosen: Chosen) -> tuple[SampledToken, ...] | None:
    """The new tokens: the accepted drafts and the token after them; None if the first is broken.

    `chosen` has the tokens sampled after the known tokens and after each draft: one more than
    `drafts`. A broken row after accepted drafts is ignored; the next step computes it again.
    """
    kept: list[SampledToken] = []
    for token, draft in zip(chosen, (*drafts, None), strict=True):
        if token is None:
            break
        kept.append(token)
        if token.token_id != draft:
            break
    return tuple(kept) or None


def group_by_sequence(
    drafts: list[tuple[int, ...]], chosen: Chosen
) -> tuple[tuple[SampledToken, ...] | None, ...]:
    """Groups `chosen`, row by row, into the new tokens of each sampling sequence."""
    if len(drafts) == len(chosen):
        return tuple([None if token is None else (token,) for token in chosen])
    grouped: list[tuple[SampledToken, ...] | None] = []
    at = 0
    for proposed in drafts:
        end = at + 1 + len(proposed)
        grouped.append(accept(proposed, chosen[at:end]))
        at = end
    return tuple(grouped)
