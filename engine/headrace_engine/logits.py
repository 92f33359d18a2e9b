"""Changes of logits that sampling parameters ask for, before a token is chosen.

In vLLM's order: min_tokens, logit_bias, repetition penalty, frequency and presence penalties.
Every change touches single entries of its own row; rows that ask for nothing are not looked at.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Rows

import numpy as np
import numpy.typing as npt
import torch

from headrace_common.sampling import SamplingParams

from .request import Sequence


def adjust(logits: torch.Tensor, sequences: Rows[Sequence], eos_token_ids: frozenset[int]) -> None:
    """Changes `logits` float32 [R, V] in place."""
    _mask_early_stops(logits, sequences, eos_token_ids)
    _add_bias(logits, sequences)
    _penalise_repetition(logits, sequences)
    _penalise_output(logits, sequences)


def wants_adjusting(sequence: Sequence) -> bool:
    params = sequence.request.params
    return (
        sequence.output_length < params.min_tokens
        or bool(params.logit_bias)
        or params.repetition_penalty != 1.0
        or _penalises_output(params)
    )


class _Entries:
    """Single entries of a matrix, gathered row by row and touched in one operation."""

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
            torch.from_numpy(np.concatenate(part)).to(device)
            for part in (self._rows, self._columns, self._values)
        )
        return (rows, columns), values


def _mask_early_stops(
    logits: torch.Tensor, sequences: Rows[Sequence], eos_token_ids: frozenset[int]
) -> None:
    entries = _Entries()
    for row, sequence in enumerate(sequences):
        params = sequence.request.params
        if sequence.output_length < params.min_tokens:
            stops = _ids(eos_token_ids.union(params.stop_token_ids))
            entries.add(row, stops[stops < logits.shape[1]], -np.inf)
    if entries:
        index, values = entries.tensors(logits.device)
        logits[index] = values


def _add_bias(logits: torch.Tensor, sequences: Rows[Sequence]) -> None:
    entries = _Entries()
    for row, sequence in enumerate(sequences):
        bias = sequence.request.params.logit_bias
        if bias:
            entries.add(row, _ids(bias.keys()), list(bias.values()))
    if entries:
        index, values = entries.tensors(logits.device)
        logits[index] += values


def _penalise_repetition(logits: torch.Tensor, sequences: Rows[Sequence]) -> None:
    """Tokens of prompt or output: positive logits divided by the penalty, others multiplied."""
    entries = _Entries()
    for row, sequence in enumerate(sequences):
        penalty = sequence.request.params.repetition_penalty
        if penalty != 1.0:
            entries.add(row, np.unique(_ids(sequence.token_ids)), penalty)
    if entries:
        index, penalties = entries.tensors(logits.device)
        found = logits[index]
        logits[index] = torch.where(found > 0, found / penalties, found * penalties)


def _penalise_output(logits: torch.Tensor, sequences: Rows[Sequence]) -> None:
    """Output tokens only, as OpenAI defines the two penalties."""
    entries = _Entries()
    for row, sequence in enumerate(sequences):
        params = sequence.request.params
        if sequence.output_length and _penalises_output(params):
            output = sequence.token_ids[sequence.prompt_length :]
            ids, counts = np.unique(_ids(output), return_counts=True)
            entries.add(row, ids, params.frequency_penalty * counts + params.presence_penalty)
    if entries:
        index, penalties = entries.tensors(logits.device)
        logits[index] -= penalties


def _penalises_output(params: SamplingParams) -> bool:
    return params.frequency_penalty != 0.0 or params.presence_penalty != 0.0


def _ids(tokens: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(tokens, dtype=np.int64)
