"""Ragged batches of recurrent layers, with random states in blocks that are in no order."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from headrace_engine.core.recurrent_state import StateBatch, StateLayout, StateRun, StateTensor
from headrace_engine.operators.state_memory import StateMemory

# The second of three recurrent layers, whose states share the memory of two layers with KV.
LAYERS, PLACES, LAYER = 3, 2, 1


@dataclass(frozen=True)
class Run:
    """The tokens of one sequence in a step. States are also saved after each of `snapshots`
    tokens; without `continues` the run begins at position 0."""

    tokens: int
    snapshots: tuple[int, ...] = ()
    continues: bool = True


RAGGED = (
    Run(1),
    Run(1, continues=False),
    Run(1),
    Run(5, snapshots=(2, 4)),
    Run(2, snapshots=(2,)),
    Run(19, snapshots=(16,), continues=False),
)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_memory(
    tensors: Sequence[StateTensor], runs: Sequence[Run], pages: tuple[int, ...]
) -> StateMemory:
    """States of `runs`. A block has as many bytes in each tensor of a cache as `pages` says. A
    sequence's state is written where it was, except for the first one's."""
    layout = StateLayout(tuple(tensors), LAYERS, PLACES, sum(pages))
    states = len(runs) + 1 + sum(len(run.snapshots) for run in runs)
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randperm(states * layout.blocks, generator=generator).view(states, layout.blocks)
    own = [len(runs), *range(1, len(runs))]
    batch = StateBatch(
        sources=blocks[: len(runs)].clone(),
        fresh=torch.tensor([not run.continues for run in runs]),
        targets=torch.cat([blocks[own], blocks[len(runs) + 1 :]]),
        runs=tuple(_runs(runs)),
    )
    caches = tuple(
        tuple(torch.zeros(states * layout.blocks, size, dtype=torch.uint8) for size in pages)
        for _ in range(PLACES)
    )
    memory = StateMemory(layout, caches, batch)
    everything = replace(batch, targets=blocks, sources=blocks)
    StateMemory(layout, caches, everything).write(
        LAYER,
        [
            random(states, *tensor.shape, seed=seed, dtype=tensor.dtype)
            for seed, tensor in enumerate(tensors)
        ],
    )
    return memory


def _runs(runs: Sequence[Run]) -> list[StateRun]:
    found, begin, saved = [], 0, len(runs)
    for sequence, run in enumerate(runs):
        ends = sorted({*run.snapshots, run.tokens})
        for start, end in itertools.pairwise((0, *ends)):
            writes = [sequence] if end == run.tokens else []
            if end in run.snapshots:
                writes.append(saved)
                saved += 1
            found.append(StateRun(sequence, begin + start, begin + end, tuple(writes)))
        begin += run.tokens
    return found


def copied(memory: StateMemory, device: torch.device | None = None) -> StateMemory:
    """A copy, on another device if one is named."""
    caches = tuple(tuple(part.clone().to(device) for part in cache) for cache in memory.caches)
    batch = memory.batch
    moved = replace(
        batch,
        sources=batch.sources.to(device),
        fresh=batch.fresh.to(device),
        targets=batch.targets.to(device),
    )
    return replace(memory, caches=caches, batch=moved)


def written(memory: StateMemory) -> list[torch.Tensor]:
    """The states that the batch wrote, its snapshots last."""
    batch = memory.batch
    fresh = torch.zeros(len(batch.targets), dtype=torch.bool, device=batch.fresh.device)
    return replace(memory, batch=replace(batch, sources=batch.targets, fresh=fresh)).read(LAYER)


def chunked(
    memory: StateMemory, runs: Sequence[Run], chunk: int
) -> list[tuple[StateMemory, list[int]]]:
    """The batch in several steps: each advances every sequence by at most `chunk` tokens, without
    snapshots. With each step the numbers of its tokens."""
    batch, steps = memory.batch, []
    starts = list(itertools.accumulate((run.tokens for run in runs), initial=0))
    for done in range(0, max(run.tokens for run in runs), chunk):
        chosen = [at for at, run in enumerate(runs) if run.tokens > done]
        parts = [Run(min(chunk, runs[at].tokens - done)) for at in chosen]
        sources = batch.targets if done else batch.sources
        step = StateBatch(
            sources=sources[chosen],
            fresh=batch.fresh[chosen] & (done == 0),
            targets=batch.targets[chosen],
            runs=tuple(_runs(parts)),
        )
        tokens = [
            starts[at] + done + offset
            for at, part in zip(chosen, parts, strict=True)
            for offset in range(part.tokens)
        ]
        steps.append((replace(memory, batch=step), tokens))
    return steps
