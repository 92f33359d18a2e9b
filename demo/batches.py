"""Batches of training text, which several processes make while the model trains."""

import multiprocessing
import os
import random
import threading
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue

import torch
from tokenizers import Tokenizer

from dialogues import draw
from tokens import CONTEXT, FILE, IGNORED, Example, encode

# Columns of the batches: a text goes into the narrowest one that it fits.
WIDTHS: tuple[int, ...] = (*range(32, 321, 32), 384, 448, 512, 768, 1024, CONTEXT)
_WAITING = 4  # finished batches of a process that are not taken yet


@dataclass(frozen=True)
class Batch:
    """Texts of similar length, one in a row and padded on the right.

    `ids` is [rows, width]; `places` are the flat positions with a label in `labels`.
    """

    ids: torch.Tensor
    places: torch.Tensor
    labels: torch.Tensor

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device, as indices."""
        return Batch(*(_index(tensor, device) for tensor in (self.ids, self.places, self.labels)))


def _index(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True).long()


_Packed = tuple[bytes, bytes, bytes, int]
_Arrays = tuple["array[int]", "array[int]", "array[int]"]


def batch_of(examples: Sequence[Example], width: int) -> Batch:
    """A batch of texts that are not longer than `width`."""
    ids, places, labels = _arrays(examples, width)
    return _batch(ids, places, labels, width)


def _arrays(examples: Sequence[Example], width: int) -> _Arrays:
    ids, places, labels = array("h"), array("i"), array("h")
    for row, example in enumerate(examples):
        ids.extend(example.ids)
        ids.extend([0] * (width - len(example.ids)))
        learned = [at for at, label in enumerate(example.labels) if label != IGNORED]
        places.extend([row * width + at for at in learned])
        labels.extend([example.labels[at] for at in learned])
    return ids, places, labels


def _batch(
    ids: "array[int] | bytearray",
    places: "array[int] | bytearray",
    labels: "array[int] | bytearray",
    width: int,
) -> Batch:
    return Batch(
        torch.frombuffer(ids, dtype=torch.int16).view(-1, width),
        torch.frombuffer(places, dtype=torch.int32),
        torch.frombuffer(labels, dtype=torch.int16),
    )


def width_of(example: Example) -> int:
    """The number of columns that a text needs."""
    return min(width for width in WIDTHS if len(example.ids) <= width)


class Batches:
    """Batches from `processes` processes. If the processes are too slow, batches are repeated."""

    def __init__(self, processes: int, tokens: int, seed: int) -> None:
        self._rng = random.Random(seed)
        context = multiprocessing.get_context("fork")
        self._queue: Queue[_Packed] = context.Queue(processes * _WAITING)
        self._processes: list[BaseProcess] = [
            context.Process(
                target=_make, args=(self._queue, tokens, f"{seed} {at}", os.getpid()), daemon=True
            )
            for at in range(processes)
        ]
        for process in self._processes:
            process.start()
        self._made: list[_Packed] = []
        self._used = 0
        self._more = threading.Condition()
        self.repeated = 0
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        while True:
            received = self._queue.get()
            with self._more:
                self._made.append(received)
                self._more.notify()

    def next(self) -> Batch:
        """A new batch if there is one, else any earlier one."""
        with self._more:
            if not self._made:
                self._more.wait_for(lambda: bool(self._made))
            if self._used < len(self._made):
                chosen = self._made[self._used]
                self._used += 1
            else:
                chosen = self._rng.choice(self._made)
                self.repeated += 1
        ids, places, labels, width = chosen
        return _batch(bytearray(ids), bytearray(places), bytearray(labels), width)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()


def _make(queue: "Queue[_Packed]", tokens: int, seed: str, owner: int) -> None:
    """Make batches of about `tokens` tokens until the owner has gone."""
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(FILE))
    rng = random.Random(seed)
    waiting: dict[int, list[Example]] = defaultdict(list)
    while os.getppid() == owner:
        example = encode(tokenizer, draw(rng))
        width = width_of(example)
        texts = waiting[width]
        texts.append(example)
        if len(texts) * width >= tokens:
            ids, places, labels = _arrays(texts, width)
            queue.put((ids.tobytes(), places.tobytes(), labels.tobytes(), width))
            waiting[width] = []
