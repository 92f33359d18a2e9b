"""Applies the sampling parameters that change logits, before a token is chosen.

The order is vLLM's: grammar, allowed tokens, bad words, min_tokens, logit_bias, repetition penalty,
frequency and presence penalties, the end of reasoning. Each change touches only entries of its own
row.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from headrace_common.sampling.params import SamplingParams

from ..core.step_plan import SampleRow
from ..core.thinking import ThinkingCursor
from ..device.transfer import to_device
from ..structured_output.masks import apply_grammars, has_grammar


def adjust(logits: torch.Tensor, rows: Sequence[SampleRow], eos_token_ids: frozenset[int]) -> None:
    """Changes `logits` float32 [R, V] in place."""
    apply_grammars(logits, rows, eos_token_ids)
    _keep_allowed(logits, rows)
    _mask_bad_words(logits, rows)
    _mask_early_stops(logits, rows, eos_token_ids)
    _add_bias(logits, rows)
    _penalise_repetition(logits, rows)
    _penalise_output(logits, rows)
    _end_reasoning(logits, rows)


def wants_adjusting(row: SampleRow) -> bool:
    return row.sequence.adjusted


class _Entries:
    """Single entries of a matrix, collected row by row and changed in one operation."""

    def __init__(self) -> None:
        self._rows: list[npt.NDArray[np.int64]] = []
        self._columns: list[npt.NDArray[np.int64]] = []
        self._values: list[npt.NDArray[np.float32]] = []

    def add(self, row: int, columns: npt.NDArray[np.int64], values: object) -> None:
        self._rows.append(np.full(columns.shape, row, dtype=np.int64))
        self._columns.append(columns)
        self._values.append(np.broadcast_to(np.asarray(values, dtype=np.float32), columns.shape))

    def __bool__(self) -> bool:
        return bool(self._rows)

    def tensors(
        self, device: torch.device
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """((rows, columns), values) on the device."""
        rows, columns, values = (
            to_device(np.concatenate(part), device)
            for part in (self._rows, self._columns, self._values)
        )
        return (rows, columns), values


def _mask_early_stops(
    logits: torch.Tensor, rows: Sequence[SampleRow], eos_token_ids: frozenset[int]
) -> None:
    entries = _Entries()
    for index, row in enumerate(rows):
        params = row.sequence.request.params
        if row.output_length < params.min_tokens and not has_grammar(row):
            stops = _ids(eos_token_ids.union(params.stop_token_ids))
            entries.add(index, stops[stops < logits.shape[1]], -np.inf)
    if entries:
        places, values = entries.tensors(logits.device)
        logits[places] = values


def _keep_allowed(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    for index, row in enumerate(rows):
        allowed = row.sequence.request.params.allowed_token_ids
        if allowed is not None:
            columns = to_device(_ids(allowed), logits.device)
            kept = logits[index, columns]
            logits[index] = -torch.inf
            logits[index, columns] = kept


def _mask_bad_words(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Masks the last token of a bad word if the output ends with the tokens before it."""
    entries = _Entries()
    for index, row in enumerate(rows):
        words = row.sequence.request.params.bad_words_token_ids
        if words:
            last = [word[-1] for word in words if _ends_with(row, word[:-1])]
            entries.add(index, _ids(last), -np.inf)
    if entries:
        places, values = entries.tensors(logits.device)
        logits[places] = values


def _ends_with(row: SampleRow, ids: Sequence[int]) -> bool:
    """Whether the row's output ends with these tokens."""
    size = len(ids)
    if size > row.output_length:
        return False
    ahead = row.ahead[-size:] if size else ()
    end = row.known_length
    missing = size - len(ahead)
    return [*row.sequence.token_ids[end - missing : end], *ahead] == [*ids]


def _add_bias(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    entries = _Entries()
    for index, row in enumerate(rows):
        bias = row.sequence.request.params.logit_bias
        if bias:
            entries.add(index, _ids(bias.keys()), list(bias.values()))
    if entries:
        places, values = entries.tensors(logits.device)
        logits[places] += values


def _penalise_repetition(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Penalises tokens of prompt or output: divides positive logits by the penalty, multiplies
    others."""
    entries = _Entries()
    for index, row in enumerate(rows):
        penalty = row.sequence.request.params.repetition_penalty
        if penalty != 1.0:
            entries.add(index, np.unique(_ids(row.token_ids)), penalty)
    if entries:
        places, penalties = entries.tensors(logits.device)
        found = logits[places]
        logits[places] = torch.where(found > 0, found / penalties, found * penalties)


def _penalise_output(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Subtracts the penalties from output tokens only, as OpenAI defines them."""
    entries = _Entries()
    for index, row in enumerate(rows):
        params = row.sequence.request.params
        if row.output_length and _penalises_output(params):
            output = row.token_ids[row.sequence.prompt_length :]
            ids, counts = np.unique(_ids(output), return_counts=True)
            entries.add(index, ids, params.frequency_penalty * counts + params.presence_penalty)
    if entries:
        places, penalties = entries.tensors(logits.device)
        logits[places] -= penalties


def _penalises_output(params: SamplingParams) -> bool:
    return params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def _end_reasoning(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Leaves one token to a row whose reasoning is over its limit."""
    entries = _Entries()
    chosen: list[int] = []
    for index, row in enumerate(rows):
        token = _forced(row)
        if token is not None:
            chosen.append(index)
            entries.add(index, _ids((token,)), 0.0)
    if entries:
        places, values = entries.tensors(logits.device)
        logits[to_device(np.array(chosen), logits.device)] = -torch.inf
        logits[places] = values


def _forced(row: SampleRow) -> int | None:
    """The only token that the limit of the row's reasoning allows; None if it allows any."""
    sequence = row.sequence
    thinking = sequence.request.thinking
    if thinking is None:
        return None
    if sequence.grammar_cursor is not None and sequence.grammar_cursor.error is not None:
        return None  # the output then ends with this error
    cursor = sequence.thinking_cursor
    if cursor is None:
        cursor = sequence.thinking_cursor = ThinkingCursor(thinking)
    return cursor.forced(sequence.token_ids, sequence.prompt_length, row.known_length, row.ahead)


def _ids(tokens: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(tokens, dtype=np.int64)
