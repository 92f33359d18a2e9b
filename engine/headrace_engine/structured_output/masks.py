"""Masks logits by grammars: minus infinity for every token that is not allowed.

The masks are computed on the host after the launch of the forward pass, so that a GPU computes
meanwhile. Rows without a grammar are not touched.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..core.step_plan import SampleRow
from ..device.transfer import to_device
from .compiler import MASK_BITS

Words = npt.NDArray[np.int32]


def has_grammar(row: SampleRow) -> bool:
    return row.sequence.request.grammar is not None


def apply_grammars(
    logits: torch.Tensor, rows: Sequence[SampleRow], eos_token_ids: frozenset[int]
) -> None:
    """Changes `logits` float32 [R, V] in place.

    A row in which no token is allowed, or whose grammar exceeds its limits, gets no finite logit. A
    row after a draft that the grammar refuses stays as it is: the draft is going to be rejected.
    """
    chosen = [index for index, row in enumerate(rows) if has_grammar(row)]
    if not chosen:
        return
    grammars = [rows[index].sequence.request.grammar for index in chosen]
    size = max(grammar.words for grammar in grammars if grammar is not None)
    words = np.zeros((len(chosen), size), dtype=np.int32)
    for place, index in enumerate(chosen):
        _allowed(rows[index], words[place], eos_token_ids)
    if logits.device.type == "cpu":
        _mask_on_host(logits, chosen, words)
    else:
        _mask_on_device(logits, chosen, words)


def _allowed(row: SampleRow, words: Words, eos_token_ids: frozenset[int]) -> None:
    """Sets the bits of `words` for the tokens that may come next."""
    sequence = row.sequence
    cursor = sequence.grammar_cursor
    if cursor is None:
        assert sequence.request.grammar is not None
        cursor = sequence.grammar_cursor = sequence.request.grammar.cursor()
    end = row.known_length
    if not cursor.advance(sequence.token_ids, sequence.prompt_length, row.ahead, end=end):
        if cursor.error is None:
            words[:] = -1
        return
    if not cursor.fill(words.ctypes.data, words.nbytes):
        words[:] = 0
        return
    params = sequence.request.params
    if row.output_length < params.min_tokens:
        _forbid_early_stop(words, eos_token_ids.union(params.stop_token_ids))


def _forbid_early_stop(words: Words, stops: frozenset[int]) -> None:
    """Forbids the ids that end an output, unless the grammar allows only these."""
    before = words.copy()
    bits = words.view(np.uint32)
    for token in stops:
        if token < len(words) * MASK_BITS:
            bits[token // MASK_BITS] &= ~np.uint32(1 << token % MASK_BITS)
    if not words.any():
        words[:] = before


def _mask_on_host(logits: torch.Tensor, chosen: list[int], words: Words) -> None:
    """Masks row by row, in the CPU's caches; numpy takes a quarter of torch's time."""
    vocab, rows = logits.shape[1], logits.numpy()
    refused = np.invert(words).view(np.uint8)
    for place, index in enumerate(chosen):
        bits = np.unpackbits(refused[place], count=vocab, bitorder="little")
        np.copyto(rows[index], -np.inf, where=bits.view(np.bool_))


def _mask_on_device(logits: torch.Tensor, chosen: list[int], words: Words) -> None:
    """Masks on the device; packed bits are copied there, one for each token."""
    vocab = logits.shape[1]
    packed = to_device(words, logits.device)
    shifts = torch.arange(MASK_BITS, dtype=torch.int32, device=logits.device)
    bits = ((packed[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab]
    index = to_device(np.array(chosen), logits.device)
    logits[index] = logits[index].masked_fill(bits == 0, -torch.inf)
