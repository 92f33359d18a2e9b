"""Images in a runner's steps: encodes those that the scheduler names, and gives a step's rows their
embeddings."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..core.config import EngineConfig
from ..core.images import ImageLimits, PromptImage
from ..core.step_plan import ScheduledSequence, SchedulerOutput
from ..device.timing import Clock, Times, begin_times
from ..models.base import BidirectionalSpan, VisionRows
from ..models.placed_model import PlacedModel
from ..models.vision.tower import MOST_IMAGES, VisionTower
from .input_batch import StepBatch

Ints = npt.NDArray[np.int64]


class _Rows(NamedTuple):
    """The rows of one image in a step, and which of its embeddings they get. They are of the
    `sequence`-th sequence, from its position `first` on; the image's last embedding is before
    `end`."""

    image: PromptImage
    rows: Ints
    embeddings: slice
    sequence: int
    first: int
    end: int


class VisionRuntime:
    """The vision tower, and the embeddings [levels, tokens, hidden size] of images by digest."""

    def __init__(
        self, config: EngineConfig, tower: VisionTower, device: torch.device, clock: Clock
    ) -> None:
        self._tower, self._device, self._clock = tower, device, clock
        self.reader, self._merge = tower.reader, tower.reader.merge
        most = config.limit_mm_per_prompt.get("image", MOST_IMAGES)
        room = config.encoder_cache_bytes // tower.token_bytes
        self._bidirectional = tower.reader.bidirectional
        step = config.max_num_batched_tokens
        largest = min(room, step) if self._bidirectional else room
        self.limits = ImageLimits(most, largest, room, whole=self._bidirectional)
        self._encoded: dict[bytes, torch.Tensor] = {}

    @classmethod
    def of(cls, config: EngineConfig, placed: PlacedModel, clock: Clock) -> "VisionRuntime | None":
        """The runtime; None if the model reads no images. `clock` counts seconds."""
        return None if placed.tower is None else cls(config, placed.tower, placed.device, clock)

    def encode(self, scheduler_output: SchedulerOutput) -> Times | None:
        """Encodes the step's new images; returns the time that it takes, None without images."""
        for digest in scheduler_output.dropped:
            del self._encoded[digest]
        if not scheduler_output.encoded:
            return None
        times = begin_times(self._device, self._clock)
        for image in scheduler_output.encoded:
            self._encoded[image.span.digest] = self._tower.encode(image)
        times.end()
        return times

    def extend(self, scheduler_output: SchedulerOutput, batch: StepBatch) -> StepBatch:
        """Returns the step's batch with the embeddings of its images, which are encoded."""
        vision = self._vision_rows(scheduler_output.scheduled)
        if vision is None:
            return batch
        return replace(batch, forward=replace(batch.forward, vision=vision))

    def _vision_rows(self, scheduled: tuple[ScheduledSequence, ...]) -> VisionRows | None:
        found = list(self._rows(scheduled))
        if not found:
            return None
        rows = np.concatenate([each.rows for each in found])
        positions = None
        if self._merge is not None:
            merge = self._merge
            positions = np.concatenate([_positions(each, merge) for each in found], axis=1)
        parts = [self._encoded[each.image.span.digest][:, each.embeddings] for each in found]
        return VisionRows(
            torch.from_numpy(rows).to(self._device),
            torch.cat(parts, dim=1),
            None if positions is None else torch.from_numpy(positions).to(self._device),
            tuple(map(_span, found)) if self._bidirectional else (),
        )

    def _rows(self, scheduled: tuple[ScheduledSequence, ...]) -> Iterator[_Rows]:
        first = 0
        for index, item in enumerate(scheduled):
            for image in item.sequence.request.images:
                span = image.span
                if span.start >= item.start + item.length or span.end <= item.start:
                    continue
                ids = np.array(item.sequence.token_ids[span.start : span.end])
                places = span.start + np.flatnonzero(np.isin(ids, self._tower.placeholders))
                begin, end = np.searchsorted(places, (item.start, item.start + item.length))
                if begin < end:
                    rows = first + places[begin:end] - item.start
                    which = slice(int(begin), int(end))
                    last = int(places[-1]) + 1
                    yield _Rows(image, rows, which, index, int(places[begin]), last)
            first += item.length + len(item.drafts)


def _span(found: _Rows) -> BidirectionalSpan:
    first, count = int(found.rows[0]), len(found.rows)
    assert found.first + count == found.end, "the step computes the image to its end"
    return BidirectionalSpan(slice(first, first + count), found.sequence, found.first)


def _positions(found: _Rows, merge: int) -> Ints:
    """Frame, row and column [3, rows] of an image's tokens, from its position on."""
    grid = found.image.span.grid
    shape = (grid[0], grid[1] // merge, grid[2] // merge)
    places: Ints = np.indices(shape).reshape(3, -1)[:, found.embeddings]
    places[0] += found.image.pixels.time
    return places + found.image.position
