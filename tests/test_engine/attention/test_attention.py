"""Every attention backend against one dense computation: ragged mixtures of prefill and decode,
head groups, scales, softcaps, windows, dtypes, block copies.

The CUDA kernels themselves cannot run here: the flash backend is tested with a stand-in for each
kernel that takes the same arguments and computes densely.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from headrace_engine import attention
from headrace_engine.attention.flash import (
    FlashAttnKernel,
    FlashBackend,
    TorchKernel,
    VarlenInputs,
    key_slots,
)
from headrace_engine.core.attention_backend import (
    AttentionBackend,
    AttentionMetadata,
    KVSpec,
    LayerParams,
)
from headrace_engine.core.errors import ConfigError
from headrace_testing.attention_scenes import BLOCKS, CASES, CPU, Case, Scene, dense
from headrace_testing.engines import cpu_backends


def dense_with_sums(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, params: LayerParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and the logarithms of the softmax's sums [Hq, n].

    With a sink of 0 and values of 1, attention returns sum / (sum + 1), whose logit is log(sum).
    """
    attended = dense(query, keys, values, params).to(query.dtype)
    open_sinks = replace(params, sinks=torch.zeros(query.shape[1]))
    shares = dense(query, keys, torch.ones_like(values), open_sinks)[..., 0]
    return attended, torch.logit(shares).T.float()


def joined(rows: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([one for one, _ in rows]), torch.cat([sums for _, sums in rows], dim=1)


def fake_flash_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    block_table: torch.Tensor | None,
    return_attn_probs: bool,
) -> Any:
    """flash_attn_varlen_func's arguments and checks, computed densely."""
    assert causal and window_size[1] == 0
    assert cu_seqlens_q.dtype is cu_seqlens_k.dtype is torch.int32
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
    window = None if window_size[0] < 0 else window_size[0] + 1
    params = LayerParams(softmax_scale, softcap or None, window)
    if block_table is not None:
        assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    output = []
    for row, length in enumerate(cu_seqlens_k.diff().tolist()):
        if block_table is None:
            span = slice(int(cu_seqlens_k[row]), int(cu_seqlens_k[row + 1]))
            keys, values = k[span], v[span]
        else:
            blocks = block_table[row].long()
            keys, values = (part[blocks].flatten(0, 1)[:length] for part in (k, v))
        queries = q[int(cu_seqlens_q[row]) : int(cu_seqlens_q[row + 1])]
        output.append(dense_with_sums(queries, keys, values, params))
    attended, sums = joined(output)
    return (attended, sums, None) if return_attn_probs else attended


def fake_torch_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    *,
    return_debug_mask: bool,
    scale: float,
    window_size_left: int,
    window_size_right: int,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> Any:
    """aten._flash_attention_forward's arguments, computed densely."""
    assert dropout == 0.0 and not return_debug_mask and window_size_right == 0
    assert causal == (window_size_left < 0)
    if block_table is not None:
        assert seqused_k is not None and cu_seq_k is None
        cu_seq_k = torch.nn.functional.pad(seqused_k.cumsum(0, dtype=torch.int32), (1, 0))
        key = key.repeat_interleave(1, dim=0)
    assert cu_seq_k is not None
    rows = []
    for row, length in enumerate(cu_seq_k.diff().tolist()):
        span = slice(int(cu_seq_k[row]), int(cu_seq_k[row + 1]))
        keys, values = key[span], value[span]
        if block_table is not None:
            blocks = block_table[row].long()
            keys, values = (part[blocks].flatten(0, 1)[:length] for part in (key, value))
        window = None if window_size_left < 0 else window_size_left + 1
        queries = query[int(cu_seq_q[row]) : int(cu_seq_q[row + 1])]
        rows.append(dense_with_sums(queries, keys, values, LayerParams(scale, None, window)))
    return (*joined(rows), None, None, None)


def make_backend(name: str) -> AttentionBackend:
    if name == "flash-attn":
        return FlashBackend(FlashAttnKernel(fake_flash_attn))
    if name == "torch":
        return FlashBackend(TorchKernel(fake_torch_flash, None))
    if name == "torch-fa3":
        return FlashBackend(TorchKernel(fake_torch_flash, "FA3"))
    return attention.select(name, CPU, torch.float32)


TORCH_ONLY = ("torch", "torch-fa3")
ALL = [*cpu_backends(), "flash-attn", *TORCH_ONLY]


PAIRS = [
    (case, name)
    for case in CASES
    for name in ALL
    # Others are refused, see below.
    if (name not in TORCH_ONLY or CASES[case].params.softcap is None)
    and (name in cpu_backends() or CASES[case].params.chunk is None)
]


@pytest.mark.parametrize(("case", "name"), PAIRS)
def test_attention_equals_the_dense_computation(case: str, name: str) -> None:
    found, exact = Scene(CASES[case], make_backend(name), torch.float32).step()
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", cpu_backends())
@pytest.mark.parametrize("case", ["mixed", "window", "chunks", "softcap", "large blocks"])
def test_bfloat16_is_exact_up_to_its_own_rounding(case: str, name: str) -> None:
    found, exact = Scene(CASES[case], make_backend(name), torch.bfloat16).step()
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ALL)
def test_copied_blocks_hold_the_same_keys(name: str) -> None:
    scene = Scene(CASES["decode"], make_backend(name), torch.float32)
    used = {block for table in scene.tables for block in table}
    spare = [block for block in range(BLOCKS) if block not in used]
    moves = list(zip(scene.tables[3][:3], spare[:3], strict=True))
    scene.backend.copy_blocks(scene.cache, torch.tensor(moves))
    scene.tables[3] = spare[:3] + scene.tables[3][3:]
    found, exact = scene.step()
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", cpu_backends())
def test_garbage_after_a_sequence_is_never_read(name: str) -> None:
    scene = Scene(CASES["mixed"], make_backend(name), torch.float32)
    used = {block for table in scene.tables for block in table}
    spare = [block for block in range(BLOCKS) if block not in used]
    for part in scene.cache:
        part[spare] = torch.nan
    found, exact = scene.step()
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ALL)
def test_block_bytes_are_what_allocate_takes(name: str) -> None:
    backend = make_backend(name)
    spec = KVSpec(2, 32, 16, torch.float32, CPU)
    taken = sum(part.nbytes for part in backend.allocate(10, spec))
    assert taken == 10 * backend.block_bytes(spec)


@pytest.mark.parametrize("name", ["flash-attn", "torch-fa3"])
def test_large_pages_are_read_in_place(name: str) -> None:
    case = Case(((300, 1), (0, 20), (256, 3)), block_size=256)
    found, exact = Scene(case, make_backend(name), torch.float32).step()
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-5)


def test_gathered_slots_follow_the_block_tables() -> None:
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, 1, 2], dtype=torch.int32),
        seq_lens=torch.tensor([3, 5], dtype=torch.int32),
        block_tables=torch.tensor([[7, 0], [2, 4]], dtype=torch.int32),
        slots=torch.tensor([30, 16]),
        num_decodes=2,
        max_query_len=1,
        max_seq_len=5,
    )
    assert key_slots(metadata, 4).tolist() == [28, 29, 30, 8, 9, 10, 11, 16]


def test_torchs_kernel_refuses_a_softcap() -> None:
    with pytest.raises(ConfigError, match="softcap"):
        Scene(CASES["softcap"], make_backend("torch"), torch.float32).step()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cuda", {}, f"must be one of auto, {', '.join(attention.BACKENDS)}"),
        ("triton", {}, "needs a cuda device"),
        ("flash", {}, "needs a cuda device"),
        ("cpu", {"device": torch.device("cuda")}, "needs a cpu device"),
    ],
)
def test_a_backend_that_cannot_run_is_refused(
    name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        attention.select(name, options.get("device", CPU), torch.bfloat16)


def test_auto_chooses_the_fastest_backend_of_the_cpu() -> None:
    expected = "cpu" if "cpu" in cpu_backends() else "reference"
    assert attention.select("auto", CPU, torch.float32).name == expected


def test_auto_falls_back_where_a_device_has_no_backend() -> None:
    assert attention.select("auto", torch.device("meta"), torch.float32).name == "reference"


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("sinks", [None, torch.empty(8, device="meta")])
def test_torchs_kernel_accepts_its_arguments(
    window: int | None, sinks: torch.Tensor | None
) -> None:
    """On the meta device, which computes shapes alone."""
    kernel = TorchKernel(torch.ops.aten._flash_attention_forward.default, None)

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    query, keys, starts = empty(5, 8, 64), empty(9, 2, 64), empty(3, dtype=torch.int32)
    lengths = empty(2, dtype=torch.int32)
    params = LayerParams(0.125, None, window, sinks=sinks)
    inputs = VarlenInputs(query, keys, keys, starts, starts, lengths, None, 3, 6, params)
    assert kernel(inputs).shape == query.shape
