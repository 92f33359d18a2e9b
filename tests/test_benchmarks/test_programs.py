"""Benchmarks that no other test runs, with the smallest workloads, and the start of all programs
outside of the packages."""

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch

import peers
from headrace_testing.checkpoints import save_checkpoint
from headrace_testing.processes import until

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PROGRAMS = sorted(
    file.stem for file in BENCHMARKS.glob("*.py") if "ArgumentParser(" in file.read_text()
)
FILES = [file.relative_to(BENCHMARKS).with_suffix("") for file in BENCHMARKS.rglob("[!_]*.py")]
MODULES = sorted(".".join(file.parts) for file in FILES)
OTHERS = ["train", "pictures"]  # of demo/ and charts/generate/
Run = Callable[..., str]


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """Restores the state of the process: programs change it, and other tests run in it too."""
    environment, threads = dict(os.environ), torch.get_num_threads()
    gradients = torch.is_grad_enabled()
    yield
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(gradients)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        save_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=1024)
    )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a program with arguments in this process; returns what it prints."""

    def run(program: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{program}.py", *arguments])
        import_module(program).main()
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("module", [*MODULES, *OTHERS])
def test_each_program_can_be_imported(module: str) -> None:
    """Every program can be imported without a device, peers and network."""
    import_module(module)


def test_no_module_is_taken_for_the_package_kernels() -> None:
    """transformers looks for the package: a module of this name would be imported with it, after a
    search through all installed packages."""
    found = find_spec("kernels")
    assert found is None or not Path(found.origin or "").is_relative_to(BENCHMARKS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_prints_its_usage(
    program: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(program, "--help")
    assert ended.value.code == 0
    assert "--" in capsys.readouterr().out


def test_shards_of_a_queue(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    small = ["--requests", "64", "--processes", "1", "--pairs", "2", "--idle-seconds", "0.2"]
    run("queue_shards", "--shards", "3", *small, "--json", str(file))
    (figures,) = json.loads(file.read_text()).values()
    assert figures["requests_per_second_of_busiest_core"] > 0
    assert 1 / 3 <= figures["busiest_node_part"] <= 1
    assert figures["commands_per_second"] > 0


def test_equality(run: Run, model: str) -> None:
    with pytest.raises(SystemExit) as ended:
        run("equality", "--model", model, "--requests", "2")
    assert ended.value.code == 0


def test_accuracy(run: Run, model: str) -> None:
    printed = run("accuracy", "--model", model, "--tokens", "24").splitlines()
    assert len(printed) == 9
    assert "logit error 0.0000" in printed[0] and "logit error 0.0000" not in printed[1]


def test_sharing(run: Run, model: str) -> None:
    printed = run("sharing", "--model", model, "--prompt", "48", "--output", "8")
    assert len(printed.splitlines()) > 3


def test_images(run: Run) -> None:
    few = ["--tiny", "--requests", "4", "--rounds", "1", "--text-rounds", "1", "--side", "40"]
    rows = [line.split(" | ") for line in run("images", *few).splitlines() if " | " in line]
    assert [row[2:4] for row in rows[2:4]] == [["1", "1"], ["4", "4"]], "decoded and encoded"
    assert len(rows) == 4 + 4


def test_tiers(run: Run, model: str, tmp_path: Path) -> None:
    few = ["--turns", "2", "--rounds", "2", "--requests", "2", "--prompt-tokens", "40"]
    printed = run("tiers", "--model", model, *few, "--folder", str(tmp_path)).splitlines()
    conversations = printed[2:5]
    assert [line.split(" | ")[-1] for line in conversations] == ["True |"] * 3, "the same tokens"
    assert len(printed) == 5 + 1 + 5


def test_disaggregated_prefill(run: Run) -> None:
    """Long prompts on other engines: chats wait less, and the long prompts' last ones longer."""
    few = ["--seeds", "1", "--requests", "150", "--lengths", "2048"]
    (row,) = run("disaggregated_prefill", *few).splitlines()[2:]
    pairs = [cell.strip(" |").replace(",", "").split(" -> ") for cell in row.split(" | ")[2:]]
    chats_itl, *_, long_ttft = [[float(value) for value in pair] for pair in pairs]
    assert chats_itl[1] < chats_itl[0] / 2
    assert long_ttft[1] > long_ttft[0]


def test_cache_bytes(run: Run) -> None:
    printed = run("cache_bytes")
    assert "| deepseek-ai/DeepSeek-V3 | 70,272 |  | 70.272 KB |" in printed
    assert "| openai/gpt-oss-20b | 49,152 |  |  |" in printed
    assert "| moonshotai/Kimi-Linear-48B-A3B-Instruct | 8,064 | 43,417,600 |" in printed


def test_kv_waste(run: Run) -> None:
    printed = run("kv_waste", "--requests", "20").splitlines()
    assert len(printed) == 2 + 4


def test_windows(run: Run) -> None:
    printed = run("windows", "--context", "2048", "--sequences", "1").splitlines()
    assert len(printed) == 2 + 2 * 4


def test_calibration(run: Run, model: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    small = ["--batches", "1,2", "--prompt-tokens", "16", "--rounds", "1", "--max-num-seqs", "2"]
    run("calibrate", "--model", model, "--output", str(file), *small)
    profile = json.loads(file.read_text())
    assert set(profile["decode_step"]) == {"1", "2"}
    assert profile["prefill_tokens_per_second"] > 0


@pytest.mark.parametrize("packs_bfloat16", [None, False], ids=["as the CPU does", "unpacked"])
def test_kernels(
    packs_bfloat16: bool | None, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs even if oneDNN lacks the instructions to pack weights in bfloat16."""
    kernels = import_module("cpu_kernels")
    monkeypatch.setattr(kernels, "MEMORY_FLOATS", 2**20)
    monkeypatch.setattr(kernels, "SIDE", 64)
    monkeypatch.setattr(kernels, "ELEMENTWISE_ROWS", (1, 64))
    if packs_bfloat16 is False:
        monkeypatch.setattr(kernels, "packs", lambda dtype: dtype is torch.float32)
    file = tmp_path / "kernels.json"
    small = ["--rounds", "1", "--threads", "1", "--only", "rms_norm", "--json", str(file)]
    printed, found = run("cpu_kernels", *small), json.loads(file.read_text())
    assert found["results"] and found["roofs"]["products_by"] in printed.splitlines()[0]


def test_absent_peers(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    run("peers", "--only", "small-64", "--peers", str(tmp_path / "none"), "--json", str(file))
    assert json.loads(file.read_text())["results"] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("workload", ["small-64", "http-32"])
def test_peers_that_are_interrupted_leave_no_engine(
    workload: str, number: signal.Signals, tmp_path: Path
) -> None:
    """The engine is loading its model, and never finishes: its configuration file is a pipe."""
    model = tmp_path / "models" / "small"
    model.mkdir(parents=True)
    os.mkfifo(model / "config.json")
    program = str(BENCHMARKS / "peers.py")
    command = [sys.executable, program, "--only", workload, "--peers", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as peers:
        found = psutil.Process(peers.pid)
        until(lambda: bool(found.children()), "an engine to start")
        started = found.children(recursive=True)
        peers.send_signal(number)
    _, left = psutil.wait_procs(started, timeout=60)
    for each in left:
        each.kill()
    assert left == []


def test_a_dtype_that_takes_too_long_is_not_chosen(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "VOCAB_SIZE", 64)
    monkeypatch.setattr(peers, "TOO_SLOW", 1e-9)
    engine = replace(peers.HEADRACE, dtypes=("float32", "bfloat16"))
    workload = peers.Workload("small-1", "small", "single", 1, (engine,))
    options = Namespace(peers=tmp_path, rounds=1, threads=1, verbose=False)
    chosen = peers.Chosen()

    dtype = peers.choose_dtype(engine, workload, Path(model), options, chosen)

    assert dtype == "float32"
    assert chosen == {("headrace", "small"): "float32"}


def test_offline(run: Run, model: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    small = ["--requests", "1", "--rounds", "1", "--threads", "1", "--peers", ""]
    run("offline", "--model", model, *small, "--json", str(file))
    (result,) = json.loads(file.read_text())["results"]
    assert result["output_tokens_per_s"] > 0
