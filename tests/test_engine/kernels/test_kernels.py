"""Each element-wise kernel against plain torch, for every instruction set that this CPU runs; and
how the libraries are chosen, loaded and compiled.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace_engine.kernels.cpu import build, library
from headrace_engine.kernels.cpu.self_check import multiplies_correctly
from headrace_engine.operators.base import HeadShape, QKNorm, TorchOps
from headrace_engine.operators.cpu import NativeOps, make_ops
from headrace_testing.cpu_levels import chosen_sets

CPU = torch.device("cpu")

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2}
ROWS = (1, 3, 70)


@pytest.fixture(params=chosen_sets())
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(library.load(request.param))


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found = request.param
    assert isinstance(found, torch.dtype)
    return found


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("width", [8, 64, 100, 896])
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm(ops: NativeOps, dtype: torch.dtype, rows: int, width: int) -> None:
    pairs, weight = random(rows, 2 * width, dtype=dtype), random(width, dtype=dtype, seed=1)
    for x in (pairs[:, width:], pairs.view(2 * rows, width)):
        close(ops.rms_norm(x, weight, 1e-6), TorchOps().rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("width", [8, 64, 100, 896])
@pytest.mark.parametrize("rows", ROWS)
def test_add_rms_norm(ops: NativeOps, dtype: torch.dtype, rows: int, width: int) -> None:
    x, residual = (random(rows, width, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = random(width, dtype=dtype, seed=2)
    expected = TorchOps().add_rms_norm(x, residual.clone(), weight, 1e-5)
    found = ops.add_rms_norm(x, residual, weight, 1e-5)
    close(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("dim", [16, 32, 64, 80, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (8, 2)])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "qk norm"])
def test_rotate_qkv(
    ops: NativeOps, dtype: torch.dtype, dim: int, heads: tuple[int, int], normed: bool
) -> None:
    shape = HeadShape(*heads, dim)
    qkv = random(33, sum(shape.sizes), dtype=dtype)
    angles = random(33, dim // 2, dtype=torch.float32, seed=1)
    norm = QKNorm(random(dim, dtype=dtype, seed=2), random(dim, dtype=dtype, seed=3))
    arguments = (angles.cos(), angles.sin(), shape, norm if normed else None)
    expected = TorchOps().rotate_qkv(qkv.clone(), *arguments)
    for found, wanted in zip(ops.rotate_qkv(qkv, *arguments), expected, strict=True):
        close(found, wanted)


@pytest.mark.parametrize("width", [8, 100, 1536])
@pytest.mark.parametrize("rows", ROWS)
def test_silu_mul(ops: NativeOps, dtype: torch.dtype, rows: int, width: int) -> None:
    gate_up = random(rows, 2 * width, dtype=dtype) * 4
    close(ops.silu_mul(gate_up), TorchOps().silu_mul(gate_up))


def test_silu_mul_of_extreme_gates(ops: NativeOps, dtype: torch.dtype) -> None:
    gates = torch.tensor([-3e38, -200.0, -90.0, 0.0, 90.0, 3e38, torch.inf, torch.nan])
    gate_up = torch.cat((gates.repeat(4), torch.ones(32))).to(dtype)[None]
    found, expected = ops.silu_mul(gate_up), TorchOps().silu_mul(gate_up)
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("width", [1, 7, 16, 50, 32000])
@pytest.mark.parametrize("rows", [1, 5])
def test_argmax_finds_the_first_largest(
    ops: NativeOps, dtype: torch.dtype, rows: int, width: int
) -> None:
    x = random(rows, width, dtype=dtype)
    first = (x == x.amax(-1, keepdim=True)).int().argmax(-1)
    indices, values = ops.argmax(x)
    assert torch.equal(indices, first)
    assert torch.equal(values.to(dtype), x.amax(-1))


def test_argmax_of_equal_rows_and_of_minus_infinity(ops: NativeOps, dtype: torch.dtype) -> None:
    x = torch.full((2, 100), -torch.inf, dtype=dtype)
    x[1] = 1.0
    assert ops.argmax(x)[0].tolist() == [0, 0]


@pytest.mark.parametrize("place", [0, 17, 98, 99])
def test_argmax_treats_nan_as_the_largest(ops: NativeOps, dtype: torch.dtype, place: int) -> None:
    x = random(2, 100, dtype=dtype)
    x[0, place] = torch.nan
    assert ops.argmax(x)[0].tolist() == [place, int(x[1].float().argmax())]


def test_strided_rows_of_argmax(ops: NativeOps, dtype: torch.dtype) -> None:
    x = random(6, 64, dtype=dtype)
    assert torch.equal(ops.argmax(x[::2, :50])[0], x[::2, :50].float().argmax(-1))


def test_other_dtypes_and_layouts_are_computed_by_torch(ops: NativeOps) -> None:
    half, plain = random(3, 64, dtype=torch.float16), TorchOps()
    weight = random(64, dtype=torch.float16, seed=1)
    assert torch.equal(ops.rms_norm(half, weight, 1e-6), plain.rms_norm(half, weight, 1e-6))
    assert torch.equal(ops.silu_mul(half), plain.silu_mul(half))
    assert torch.equal(ops.argmax(half)[0], half.argmax(-1))
    transposed = random(64, 6, dtype=torch.float32).T
    close(ops.silu_mul(transposed), plain.silu_mul(transposed))
    added = ops.add_rms_norm(transposed, transposed, weight.float(), 1e-6)
    close(added[0], plain.add_rms_norm(transposed, transposed, weight.float(), 1e-6)[0])


def test_zero_rows_are_allowed(ops: NativeOps, dtype: torch.dtype) -> None:
    assert ops.silu_mul(random(0, 64, dtype=dtype)).shape == (0, 32)
    assert ops.rms_norm(random(0, 64, dtype=dtype), random(64, dtype=dtype), 1e-6).shape == (0, 64)


class Miscalculating(library.Kernels):
    """The kernels of this CPU under AMX's name, which make one mistake in each product."""

    def __init__(self) -> None:
        right = library.load()
        super().__init__("amx", build.library_path(right.isa))
        self._right = self.linear_forward
        self.linear_forward = self._wrong

    def _wrong(self, *arguments: int) -> int:
        code = self._right(*arguments)
        ctypes.c_float.from_address(arguments[2]).value += 1.0
        return code


def test_every_library_multiplies_correctly(ops: NativeOps) -> None:
    assert multiplies_correctly(ops._kernels)


def test_amx_that_gives_wrong_products_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = library.load()
    loads = iter((Miscalculating(), usual))
    monkeypatch.setattr("headrace_engine.operators.cpu.load", lambda *_isa: next(loads))

    found = make_ops(torch.device("cpu"))

    assert isinstance(found, NativeOps)
    assert found._kernels is usual


def test_ops_without_a_library_are_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.FORCE_ISA, "no-such-set")
    assert isinstance(make_ops(CPU), TorchOps)


def test_the_best_library_of_this_cpu_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(library.FORCE_ISA, raising=False)
    assert library.load().isa == build.runnable_sets()[0].name


def test_the_environment_forces_an_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.FORCE_ISA, "baseline")
    assert library.load().isa == "baseline"


def test_an_unknown_instruction_set_is_refused_with_the_known_ones() -> None:
    with pytest.raises(library.KernelsUnavailable, match="'mmx' is not one of .*baseline"):
        library.load("mmx")


def test_kernels_share_the_openmp_runtime_of_torch() -> None:
    """Two runtimes would mean two thread pools that fight for the same cores."""
    script = (
        "from headrace_engine.kernels.cpu import library; library.load();"
        "print(len(library.openmp_runtimes()))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="CXX names 'no-such-compiler'"):
        build.build(tmp_path, cxx="no-such-compiler -O3")


def test_without_a_compiler_the_error_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(build.BuildError, match=r"install g\+\+ or clang"):
        build.build(tmp_path)


def compiler(path: Path, refused: str) -> str:
    """A program that writes its last argument, but fails if the command line contains `refused`."""
    path.write_text(
        f'#!/bin/sh\ncase "$*" in *{refused}*) echo no >&2; exit 1;; esac\n'
        'for last; do :; done\necho "$*" >> "$0.log"\n: > "$last"\n'
    )
    path.chmod(0o755)
    return str(path)


def test_the_error_of_a_failing_compiler_quotes_its_output(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="no"):
        build.build(tmp_path, cxx=compiler(tmp_path / "cxx", refused=""))
    assert list(tmp_path.glob("*.so")) == []


def test_a_compiler_that_does_not_finish_is_one_sentence_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = tmp_path / "cxx"
    endless.write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    endless.chmod(0o755)
    monkeypatch.setattr(build, "TIMEOUT_S", 0.05)
    with pytest.raises(
        build.BuildError, match=r"^\S+ did not finish within 0.05 s: try again .*`$"
    ):
        build.build(tmp_path, cxx=str(endless))


def test_instruction_sets_that_the_compiler_lacks_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    report = build.build(tmp_path, cxx=compiler(tmp_path / "cxx", refused="x86-64-v4"))
    names = [path.name for path in report.libraries]
    assert names == ["libheadrace_avx2.so", "libheadrace_baseline.so"]
    assert set(report.skipped) == {"amx", "avx512_bf16", "avx512"}


def test_for_this_cpu_only_the_best_library_that_compiles_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "runnable_sets", lambda: build.X86_64[2:])
    best = build.build_for_this_cpu(tmp_path, compiler(tmp_path / "cxx", refused="nothing"))
    assert [path.name for path in best.libraries] == ["libheadrace_avx512.so"]
    next_best = build.build_for_this_cpu(tmp_path, compiler(tmp_path / "old", refused="v4"))
    assert [path.name for path in next_best.libraries] == ["libheadrace_avx2.so"]
    assert set(next_best.skipped) == {"avx512"}
    with pytest.raises(build.BuildError, match="v4"):
        build.build_for_this_cpu(tmp_path, compiler(tmp_path / "none", refused="O3"))


def test_libraries_that_are_up_to_date_are_kept(tmp_path: Path) -> None:
    command = compiler(tmp_path / "cxx", refused="nothing")
    first = build.build(tmp_path, cxx=command)
    log = tmp_path / "cxx.log"
    log.unlink()
    assert build.build(tmp_path, cxx=command) == first
    assert not log.exists()
    # Other processes, in which sets have another order, must keep them too.
    script = (
        "from pathlib import Path; from headrace_engine.kernels.cpu.build import build; "
        f"build(Path({str(tmp_path)!r}), {command!r})"
    )
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert not log.exists()


def test_other_architectures_get_the_baseline_alone() -> None:
    assert build.instruction_sets("aarch64") == (build.BASELINE,)


def test_libraries_are_compiled_for_no_particular_machine() -> None:
    flags = [flag for target in build.X86_64 for flag in target.flags]
    assert not any("native" in flag for flag in (*build.COMMON_FLAGS, *flags))


def test_products_on_amx_tiles_by_emulation(tmp_path: Path) -> None:
    """Few machines have AMX: its instructions are emulated, but the code that uses them is the real
    one."""
    try:
        compiler = build._find_compiler(None)
    except build.BuildError as error:
        pytest.skip(str(error))
    program = tmp_path / "tiles"
    source = Path(__file__).with_name("emulated_tiles.cpp")
    subprocess.run(
        [*compiler, "-std=c++17", "-I", str(build.HERE), str(source), "-o", str(program)],
        check=True,
        timeout=120,
    )
    assert subprocess.run([program], check=False, timeout=60).returncode == 0
