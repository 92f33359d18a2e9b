"""The recurrences of state layers, token by token in torch: exact, slow, and the reference of every
faster implementation. All take one sequence's run of n tokens and return its outputs and its state
after them.
"""

import torch


def causal_conv(
    x: torch.Tensor, window: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A convolution of each channel with its own weights, over the positions before and at each
    token.

    x [n, C], weight [C, K], bias [C]; `window` [C, K - 1] has the inputs before the run. Returns
    [n, C] and the window after the run.
    """
    inputs = torch.cat([window.T, x])
    # Sums in one order, so that a token's output does not depend on its run.
    output = inputs[: len(x)] * weight[:, 0]
    for at in range(1, weight.shape[1]):
        output = output + inputs[at : at + len(x)] * weight[:, at]
    return output if bias is None else output + bias, inputs[len(x) :].T


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule of https://arxiv.org/abs/2412.06464, in float32.

    query and key [n, H, K], normalised and scaled; value [n, H, V]; decay (a logarithm) [n, H], or
    [n, H, K] for one of each key channel (Kimi Delta Attention); beta [n, H]; state [H, K, V].
    Returns [n, H, V] and the state after the run.
    """
    outputs = torch.empty_like(value)
    factors = decay.exp() if decay.ndim == 3 else decay.exp()[..., None]
    for at in range(len(query)):
        state = state * factors[at][..., None]
        known = torch.einsum("hkv,hk->hv", state, key[at])
        change = (value[at] - known) * beta[at][:, None]
        state = state + key[at][..., None] * change[:, None]
        outputs[at] = torch.einsum("hkv,hk->hv", state, query[at])
    return outputs, state


def state_space(
    values: torch.Tensor,
    steps: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence of Mamba-2, https://arxiv.org/abs/2405.21060, in float32.

    values [n, H, P], steps [n, H], a and skip [H], b and c [n, H, N], state [H, P, N]. Returns
    [n, H, P] and the state after the run.
    """
    outputs = values * skip[:, None]
    factors = torch.exp(steps * a)
    for at in range(len(values)):
        change = (steps[at][:, None] * values[at])[..., None] * b[at][:, None]
        state = state * factors[at][:, None, None] + change
        outputs[at] += torch.einsum("hpn,hn->hp", state, c[at])
    return outputs, state


def selective_scan(
    values: torch.Tensor,
    steps: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence of Mamba, https://arxiv.org/abs/2312.00752, in float32.

    values and steps [n, C], a [C, N], b and c [n, N], skip [C], state [C, N]. Returns [n, C] and
    the state after the run.
    """
    outputs = values * skip
    for at in range(len(values)):
        change = (steps[at] * values[at])[:, None] * b[at]
        state = state * torch.exp(steps[at][:, None] * a) + change
        outputs[at] += state @ c[at]
    return outputs, state
