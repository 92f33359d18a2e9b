"""`make test-cpus`: a process at a lower level of instructions uses no more, and a level that was
not reached has not passed."""

import os
from dataclasses import replace

import pytest

from headrace_engine.kernels.cpu import build
from headrace_testing import cpu_levels
from headrace_testing.cpu_levels import LEVELS, Used

RUNNABLE = [target.name for target in build.runnable_sets()]
AVX2, AVX512, *_ = LEVELS
FOUND = {
    "avx2": Used("avx2", "AVX2", "Intel AVX2", "Haswell", wide=False),
    "avx512": Used("avx512", "AVX512", "Intel AVX-512 with AVX512BW", "SkylakeX", wide=True),
}


@pytest.mark.skipif("avx2" not in RUNNABLE, reason="needs a CPU with AVX2")
def test_a_process_at_the_level_of_avx2_uses_no_more() -> None:
    found = cpu_levels.used(os.environ | AVX2.environment())
    assert found.is_of(AVX2), found


def test_a_level_is_reached_by_all_or_not_at_all() -> None:
    assert FOUND["avx2"].is_of(AVX2) and not FOUND["avx2"].is_of(AVX512)
    assert FOUND["avx512"].is_of(AVX512) and not FOUND["avx512"].is_of(AVX2)
    for field in ("kernels", "torch", "onednn", "blas", "wide"):
        mixed = replace(FOUND["avx2"], **{field: getattr(FOUND["avx512"], field)})
        assert not mixed.is_of(AVX2), field


def test_a_level_that_is_not_reached_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_levels, "used", lambda _: FOUND["avx512"])
    with pytest.raises(RuntimeError, match="avx2 cannot be emulated on this CPU: .*"):
        cpu_levels.run(AVX2, [])
