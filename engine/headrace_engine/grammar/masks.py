"""What grammars allow, written into logits: minus infinity for every other token.

Runs on the host between the launch of a forward pass and the use of its logits, so that on a GPU
the pass computes meanwhile. It touches the rows that have a grammar and no others.
"""

from collections.abc import Sequence as Rows

import numpy as np
import numpy.typing as npt
import torch

from ..plan import SampleRow
from ..transfer import to_device
from .compiler import MASK_BITS

Words = npt.NDArray[np.int32]


def has_grammar(row: SampleRow) -> bool:
    return row.sequence.request.grammar is not None


def apply_grammars(
    logits: torch.Tensor, rows: Rows[SampleRow], eos_token_ids: frozenset[int]
) -> None:
    """Changes `logits` float32 [R, V] in place.

    A row that nothing is allowed in, or whose grammar went over its limits, gets no finite logit.
    One that lies behind a proposed token that the grammar refuses stays as it is: that token will
    be refused too.
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
    """Takes ids that end an output away, unless the grammar leaves nothing but the end."""
    before = words.copy()
    bits = words.view(np.uint32)
    for token in stops:
        if token < len(words) * MASK_BITS:
            bits[token // MASK_BITS] &= ~np.uint32(1 << token % MASK_BITS)
    if not words.any():
        words[:] = before


def _mask_on_host(logits: torch.Tensor, chosen: list[int], words: Words) -> None:
    """A row at a time, which stays in the caches; numpy fills a quarter as long as torch."""
    vocab, rows = logits.shape[1], logits.numpy()
    refused = np.invert(words).view(np.uint8)
    for place, index in enumerate(chosen):
        bits = np.unpackbits(refused[place], count=vocab, bitorder="little")
        np.copyto(rows[index], -np.inf, where=bits.view(np.bool_))


def _mask_on_device(logits: torch.Tensor, chosen: list[int], words: Words) -> None:
    """The packed bits cross to the device, an eighth of a byte a token."""
    vocab = logits.shape[1]
    packed = to_device(words, logits.device)
    shifts = torch.arange(MASK_BITS, dtype=torch.int32, device=logits.device)
    bits = ((packed[:, :, None] >> shifts) & 1).flatten(1)[:, :vocab]
    index = to_device(np.array(chosen), logits.device)
    logits[index] = logits[index].masked_fill(bits == 0, -torch.inf)
