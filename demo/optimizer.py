"""The optimizer of the demo models that write text."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn


def whole(matrix: torch.Tensor) -> Sequence[torch.Tensor]:
    """The matrices that one weight joins, if it joins none."""
    return [matrix]


class Optimizer:
    """Muon for `matrices`, Adam for the other weights.

    Muon (Jordan et al., 2024) makes the singular values of an update nearly equal. The
    optimizer keeps float32 weights; the model has a copy in its own type. `pieces` are the
    matrices that one weight joins.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        others: Iterable[nn.Parameter],
        weight_decay: float,
        pieces: Callable[[torch.Tensor], Sequence[torch.Tensor]] = whole,
    ) -> None:
        self._matrices, self._others = list(matrices), list(others)
        self._weight_decay, self._pieces = weight_decay, pieces
        self._matrix_masters = [weight.detach().float().clone() for weight in self._matrices]
        self._other_masters = [weight.detach().float().clone() for weight in self._others]
        self._momenta = [torch.zeros_like(weight) for weight in self._matrix_masters]
        self._means = [torch.zeros_like(weight) for weight in self._other_masters]
        self._squares = [torch.zeros_like(weight) for weight in self._other_masters]
        self._steps = 0

    def step(self, rate: float) -> None:
        """Change the weights by their gradients, and clear the gradients."""
        self._steps += 1
        self._step_matrices(rate)
        self._step_others(rate)
        for weight in (*self._matrices, *self._others):
            weight.grad = None

    @torch.no_grad()
    def _step_matrices(self, rate: float) -> None:
        gradients = _gradients(self._matrices)
        torch._foreach_lerp_(self._momenta, gradients, 0.05)
        torch._foreach_lerp_(gradients, self._momenta, 0.95)
        pieces = [piece for each in gradients for piece in self._pieces(each)]
        places = [piece for each in self._matrix_masters for piece in self._pieces(each)]
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for at, piece in enumerate(pieces):
            groups[tuple(piece.shape)].append(at)
        torch._foreach_mul_(self._matrix_masters, 1 - rate * self._weight_decay)
        for shape, found in groups.items():
            updates = _orthogonal(torch.stack([pieces[at] for at in found]))
            size = -rate * 0.2 * math.sqrt(max(shape))
            torch._foreach_add_([places[at] for at in found], list(updates.float()), alpha=size)
        torch._foreach_copy_(list(self._matrices), self._matrix_masters)

    @torch.no_grad()
    def _step_others(self, rate: float) -> None:
        first, second = 0.9, 0.98
        gradients = _gradients(self._others)
        torch._foreach_lerp_(self._means, gradients, 1 - first)
        torch._foreach_mul_(self._squares, second)
        torch._foreach_addcmul_(self._squares, gradients, gradients, 1 - second)
        roots = torch._foreach_sqrt(self._squares)
        torch._foreach_div_(roots, math.sqrt(1 - second**self._steps))
        torch._foreach_add_(roots, 1e-8)
        size = -rate / (1 - first**self._steps)
        torch._foreach_addcdiv_(self._other_masters, self._means, roots, size)
        torch._foreach_copy_(list(self._others), self._other_masters)


def _gradients(weights: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [weight.grad.float() for weight in weights if weight.grad is not None]


def _orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices [count, rows, columns] with singular values near 1, by five Newton-Schulz steps."""
    tall = matrices.shape[1] > matrices.shape[2]
    x: torch.Tensor = matrices.bfloat16()
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    result: torch.Tensor = x.mT if tall else x
    return result
