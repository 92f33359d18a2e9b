"""Which drafts hold, by the tokens that the sampler chose behind each of them.

The sampler draws every position's token from the target's own distribution, with that position's
own random number. A draft holds as long as it is the token that was drawn there; the first token
that differs replaces it, and what was computed behind it is void. So the output is, token for
token, the one without speculation, whatever proposes: with a proposal that does not look at the
random number this is the rejection sampling of Leviathan et al. ("Fast inference from transformers
via speculative decoding", 2023); with one that draws by the same number it is the coupling of
Daliri et al. ("Coupling without communication and drafter-invariant speculative decoding", 2024).
"""

from ..outputs import SampledToken

Chosen = tuple[SampledToken | None, ...]


def accept(drafts: tuple[int, ...], chosen: Chosen) -> tuple[SampledToken, ...] | None:
    """The new tokens: accepted drafts and the one behind them; None where not even that is sound.

    `chosen` has what was sampled behind the known tokens and behind each draft: one more than
    `drafts`. A broken row behind accepted drafts is left to the next step to run into again.
    """
    kept: list[SampledToken] = []
    for token, draft in zip(chosen, (*drafts, None), strict=True):
        if token is None:
            break
        kept.append(token)
        if token.token_id != draft:
            break
    return tuple(kept) or None


def group(
    drafts: list[tuple[int, ...]], chosen: Chosen
) -> tuple[tuple[SampledToken, ...] | None, ...]:
    """`chosen`, row by row, as the new tokens of each sampling sequence with its `drafts`."""
    if len(drafts) == len(chosen):
        return tuple([None if token is None else (token,) for token in chosen])
    grouped: list[tuple[SampledToken, ...] | None] = []
    at = 0
    for proposed in drafts:
        end = at + 1 + len(proposed)
        grouped.append(accept(proposed, chosen[at:end]))
        at = end
    return tuple(grouped)
