"""The doctor's findings on this machine and on simulated ones."""

import json
import os
import shutil
import socket
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest

import headrace_engine
from headrace_cli import machine
from headrace_cli.doctor.checks import engine, environment, hardware, model, network
from headrace_cli.doctor.checks.finding import Finding, Level
from headrace_cli.errors import UsageError
from headrace_engine.kernels.cpu.build import library_path
from headrace_testing.gguf_files import sentencepiece_values, write_tokenizer_gguf
from headrace_testing.in_process import headrace


def only(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    return finding


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors(3 * 2**20))
    return folder


def safetensors(size: int) -> bytes:
    """A safetensors file with one tensor."""
    head = {"__metadata__": {}, "a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    header = json.dumps(head).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


def test_a_complete_checkpoint_passes(checkpoint: Path) -> None:
    found = only(model.check(str(checkpoint)))

    assert found.level is Level.OK
    assert "LlamaForCausalLM, 3 MiB" in found.detail
    assert model.weight_bytes(str(checkpoint)) == len(safetensors(3 * 2**20))


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer.json"),
        ("model.safetensors", "no *.safetensors"),
    ],
)
def test_a_checkpoint_without_a_file_names_it(checkpoint: Path, absent: str, message: str) -> None:
    (checkpoint / absent).unlink()

    found = only(model.check(str(checkpoint)))

    assert found.level is Level.FAIL
    assert message in found.detail
    assert found.remedy
    with pytest.raises(UsageError, match=message.replace("*", r"\*")):
        model.refuse_unusable(str(checkpoint))


def test_a_missing_shard_is_named(checkpoint: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))

    assert "no model-00002-of-00002.safetensors" in only(model.check(str(checkpoint))).detail


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (safetensors(2**20)[:-1], "bytes of model.safetensors"),
        (safetensors(5)[:20], "an unreadable model.safetensors"),
        (b"", "an unreadable model.safetensors"),
        (bytes(100), "an unreadable model.safetensors"),
        (b"version https://git-lfs.github.com/spec/v1", "an unreadable model.safetensors"),
    ],
)
def test_incomplete_weights_are_reported(checkpoint: Path, content: bytes, message: str) -> None:
    (checkpoint / "model.safetensors").write_bytes(content)

    found = only(model.check(str(checkpoint)))

    assert found.level is Level.FAIL and message in found.detail
    assert "the whole checkpoint again" in found.remedy


def test_pickled_weights_are_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")

    found = only(model.check(str(checkpoint)))
    assert "pickled" in found.detail and "convert" in found.remedy


def test_a_config_that_is_not_json_is_reported(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{")

    found = only(model.check(str(checkpoint)))

    assert found.level is Level.FAIL
    assert "config.json" in found.detail


@pytest.mark.parametrize("path", ["/nowhere/model", "./nowhere", "../nowhere", "~/nowhere"])
def test_a_missing_path_is_not_a_hub_id(path: str) -> None:
    found = only(model.check(path))

    assert found.level is Level.FAIL
    assert "neither a folder nor a hub id" in found.detail


@pytest.mark.parametrize(
    ("name", "message"),
    [("tiny.gguf", "tiny.gguf is cut short"), ("w.bin", "w.bin is a file: give the folder")],
)
def test_a_file_is_not_a_model(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is refused even if it is named like a model of the hub."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(b"GGUF")

    with pytest.raises(UsageError, match=message):
        model.refuse_unusable(name)


def test_a_gguf_file_is_a_model(tmp_path: Path) -> None:
    file = write_tokenizer_gguf(tmp_path / "Q8_0.gguf", sentencepiece_values({"a": -1.0}))

    for each in (file, tmp_path):
        found = only(model.check(str(each)))
        assert found.level is Level.OK
        assert found.detail == f"{file}: LlamaForCausalLM, float32, 0 MiB"
        assert model.weight_bytes(str(each)) == file.stat().st_size


def test_of_several_gguf_files_one_must_be_named(tmp_path: Path) -> None:
    for name in ("Q4_K_M", "Q8_0"):
        write_tokenizer_gguf(tmp_path / f"{name}.gguf", sentencepiece_values({"a": -1.0}))

    with pytest.raises(UsageError, match=r"has 2 GGUF files: .*Q4_K_M.gguf, Q8_0.gguf"):
        model.refuse_unusable(str(tmp_path))
    assert model.weight_bytes(str(tmp_path)) is None


def test_a_hub_id_out_of_reach_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    found = only(model.check("some-org/some-model"))

    assert found.level is Level.FAIL
    assert "some-org/some-model" in found.detail
    model.refuse_unusable("some-org/some-model")  # the engine's download may still succeed


def test_a_hub_that_cannot_be_reached_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", endpoint)

    found = only(model.check("some-org/some-model"))

    assert found.level is Level.FAIL and "cannot be reached" in found.detail


def test_a_busy_port_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = only(network.port("127.0.0.1", taken.getsockname()[1]))

    assert busy.level is Level.FAIL
    assert only(network.port("127.0.0.1", 0)).level is Level.OK


def test_an_unreachable_redis_fails_without_showing_its_password() -> None:
    found = only(network.queue("redis://user:secret@127.0.0.1:1/0"))

    assert found.level is Level.FAIL
    assert "redis://user:***@127.0.0.1:1/0" in found.detail
    assert "secret" not in found.detail + found.remedy


def test_an_invalid_url_fails() -> None:
    assert only(network.queue("localhost:6379")).level is Level.FAIL


def test_the_embedded_server_is_found() -> None:
    assert only(network.queue(None)).level is Level.OK


def test_the_packages_of_this_environment_are_fine() -> None:
    found = only(environment.packages())

    assert found.level is Level.OK, found.detail
    assert "torch" in found.detail


def test_missing_and_old_packages_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["absent-package>=1; extra == 'engine'", 'pytest[x]>=9999.1; extra == "up"']
    monkeypatch.setattr(environment, "requires", lambda _: wanted)

    found = only(environment.packages())

    assert found.level is Level.FAIL
    assert "absent-package is not installed" in found.detail
    assert "is older than 9999.1" in found.detail
    assert "headrace[up]" in found.remedy


def test_a_data_folder_that_cannot_be_written_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)

    assert only(environment.data_dir(Path("/"))).level is Level.FAIL


def test_memory_is_compared_with_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "available_memory", lambda: 8 * 2**30)

    assert only(hardware.memory(4 * 2**30)).level is Level.OK
    assert only(hardware.memory(None)).level is Level.OK
    assert only(hardware.memory(16 * 2**30)).level is Level.WARNING


def test_a_gpu_that_torch_does_not_see_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    answer: dict[str, object] = {"version": "2.13.0+cpu", "built_for": None, "gpus": [], "free": []}
    monkeypatch.setattr(hardware, "visible_gpus", lambda _: ("GPU-a",))
    monkeypatch.setattr(hardware, "_ask_torch", lambda: answer)

    assert only(hardware.accelerator()).level is Level.WARNING


def test_an_engine_that_needs_a_gpu_fails_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    answer: dict[str, object] = {"version": "2.13.0", "built_for": "13.0", "gpus": [], "free": []}
    monkeypatch.setattr(hardware, "visible_gpus", lambda _: ())
    monkeypatch.setattr(hardware, "_ask_torch", lambda: answer)

    found = only(hardware.accelerator(needed=True))

    assert found.level is Level.FAIL
    assert "built for CUDA 13.0" in found.detail


def test_a_driver_is_needed_only_if_the_engine_must_use_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", absent)

    assert only(engine.driver({})).level is Level.OK
    found = only(engine.driver({"HEADRACE_ENGINE_DEVICE": "cuda:0"}))
    assert found.level is Level.FAIL
    assert "spec.engine.gpu" in found.remedy


@pytest.mark.parametrize(
    ("answer", "device", "level"),
    [
        ({"launcher": "/opt/x.so", "compiler": None}, "cuda", Level.OK),
        ({"launcher": None, "compiler": "/usr/bin/gcc"}, "cuda", Level.OK),
        ({"launcher": None, "compiler": None}, "cuda", Level.FAIL),
        ({"launcher": None, "compiler": None}, "cpu", Level.WARNING),
        ("it crashed", "cpu", Level.WARNING),
    ],
)
def test_triton_needs_its_launcher_or_a_compiler(
    answer: object, device: str, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_ask_triton", lambda: answer)

    assert only(engine.launcher({"HEADRACE_ENGINE_DEVICE": device})).level is level


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_triton_is_asked_for_its_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", "/usr/bin/some-compiler")

    assert engine._ask_triton() == {"launcher": None, "compiler": "/usr/bin/some-compiler"}


def test_ranks_of_one_model_need_more_shared_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(total=256 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    assert only(engine.shared_memory({}, tmp_path)).level is Level.OK
    ranks = {"HEADRACE_ENGINE_TENSOR_PARALLEL_SIZE": "2"}
    assert only(engine.shared_memory(ranks, tmp_path)).level is Level.FAIL
    assert only(engine.shared_memory({}, tmp_path / "none")).level is Level.WARNING


def test_a_cache_that_cannot_be_written_fails(tmp_path: Path) -> None:
    assert only(engine.volume({"HOME": str(tmp_path)})).level in (Level.OK, Level.WARNING)
    found = only(engine.volume({"HOME": str(tmp_path / "none")}))
    assert found.level is Level.FAIL


def test_a_torch_that_does_not_load_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_ASK_TORCH", "raise ImportError('libcudart.so.13')")

    found = only(hardware.accelerator())

    assert found.level is Level.FAIL
    assert "libcudart.so.13" in found.detail


def test_a_cpu_without_avx2_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset({"sse2"}))
    assert only(hardware.processor()).level is Level.WARNING

    monkeypatch.setattr(hardware, "cpu_flags", lambda: frozenset({"avx2"}))
    assert only(hardware.processor()).level is Level.OK


@pytest.mark.parametrize("built", [True, False])
def test_missing_kernels_are_a_warning(
    built: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / library_path("avx2").relative_to(Path(headrace_engine.__file__).parent)
    library.parent.mkdir(parents=True)
    if built:
        library.touch()
    spec = ModuleSpec("headrace_engine", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(hardware, "find_spec", lambda _: spec)

    found = only(hardware.kernels())

    assert found.level is (Level.OK if built else Level.WARNING)
    assert ("avx2" in found.detail) is built


def test_a_container_has_what_its_limits_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"cpu.max": "50000 100000", "memory.max": "1000", "memory.current": "400"}
    for name, text in limits.items():
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)

    assert machine.usable_cores() == 1
    assert machine.available_memory() == 600


def test_visible_devices_are_those_of_the_environment() -> None:
    assert machine.visible_gpus({"CUDA_VISIBLE_DEVICES": "0, GPU-b"}) == ("0", "GPU-b")
    assert machine.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()


def test_the_command_fails_and_says_what_to_do(tmp_path: Path) -> None:
    done = headrace("doctor", "--model", str(tmp_path))

    assert done.returncode == 1
    assert "has no config.json" in " ".join(done.stdout.split())
    assert "- model: give the folder of a HF checkpoint" in done.stdout
