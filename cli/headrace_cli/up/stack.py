"""The processes that `up` runs, and their settings. Pure: nothing is started or read here."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace_common.text.checkpoint import DEMO_MODEL, default_name
from headrace_common.wire.messages import MAX_ID_CHARS

from ..errors import UsageError
from ..flags.assignment import ProcessArguments
from ..flags.flag import Flag, option
from ..processes.child import ChildSpec
from ..sockets import client_host

_DRAIN_MARGIN = 15.0  # seconds beyond the child's own drain time before it is killed
_THREADS = "HEADRACE_ENGINE_THREADS"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """The options of `up`. `model` is a folder, a hub id or DEMO_MODEL; times are in seconds.

    Raises UsageError for a model name that requests cannot contain.
    """

    model: str = DEMO_MODEL
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    engines: int = 1
    gateways: int = 1
    sealing_keys_file: Path | None = None
    drain_timeout: float = 30.0
    arguments: ProcessArguments = ProcessArguments()

    def __post_init__(self) -> None:
        if len(self.model_name) > MAX_ID_CHARS:
            raise UsageError(
                f"the model's name has over {MAX_ID_CHARS} characters",
                "give a shorter one with --served-model-name",
            )
        if self.engines > 1 and self.arguments.nnodes > 1:
            raise UsageError(
                f"--engines {self.engines} cannot share the port on which other nodes join",
                "use one engine with --nnodes",
            )

    @property
    def model_name(self) -> str:
        """The name that clients use for the model: by default the last part of its path or hub
        id."""
        return self.served_model_name or default_name(self.model)

    @property
    def flags(self) -> list[Flag]:
        """The options that engines and gateways get as settings."""
        values = {
            "model": self.model,
            "served_model_name": self.model_name,
            "drain_timeout": self.drain_timeout,
            "sealing_keys_file": self.sealing_keys_file,
        }
        return [
            Flag(name, str(value), option(name))
            for name, value in values.items()
            if value is not None
        ]

    @property
    def url(self) -> str:
        return f"http://{client_host(self.host)}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostResources:
    """The resources that engines share: GPUs as in CUDA_VISIBLE_DEVICES, and CPU cores."""

    gpus: Sequence[str] = ()
    cores: int = 1

    def env(self, index: int, config: UpConfig) -> dict[str, str]:
        """Variables that divide the resources among several engines; one engine gets all."""
        if config.engines == 1:
            return {}
        ranks = config.arguments.tensor_parallel_size
        if self.gpus:
            first = index % max(1, len(self.gpus) // ranks) * ranks
            return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus[first : first + ranks])}
        if config.arguments.threads is not None:
            return {}
        return {_THREADS: str(max(1, self.cores // (config.engines * ranks)))}


def engine_spec(
    index: int, config: UpConfig, *, redis_url: str, metrics_fd: int, resources: HostResources
) -> ChildSpec:
    """The process of an engine. The listening socket `metrics_fd` outlives it, to keep its port."""
    name = f"engine-{index}"
    env = {
        "HEADRACE_ENGINE_REDIS_URL": redis_url,
        "HEADRACE_ENGINE_MODEL": config.model,
        "HEADRACE_ENGINE_SERVED_MODEL_NAME": config.model_name,
        # The gateways get the model from their settings; a registration would outlive this run.
        "HEADRACE_ENGINE_REGISTER_MODEL": "false",
        "HEADRACE_ENGINE_METRICS_FD": str(metrics_fd),
        "HEADRACE_ENGINE_DEBUG_PAGES": "true",  # its metrics port is on loopback
        "HEADRACE_ENGINE_DRAIN_TIMEOUT": str(config.drain_timeout),
        "HEADRACE_ENGINE_LOG_FORMAT": "json",
        "HEADRACE_ENGINE_DISPLAY_NAME": name,
        **_sealing("ENGINE", config),
        **resources.env(index, config),
    }
    argv = (sys.executable, "-m", "headrace_engine", *config.arguments.engine)
    return _spec(name, argv, env, config, fds=(metrics_fd,))


def gateway_spec(
    index: int, config: UpConfig, *, redis_url: str, metrics_fd: int, fd: int, supervisor_fd: int
) -> ChildSpec:
    """A gateway's process. All gateways share the socket `fd`; the others are its own."""
    env = {
        "HEADRACE_GATEWAY_REDIS_URL": redis_url,
        "HEADRACE_GATEWAY_MODEL": config.model,
        "HEADRACE_GATEWAY_SERVED_MODEL_NAME": config.model_name,
        "HEADRACE_GATEWAY_LORA_MODULES": json.dumps(config.arguments.adapters),
        "HEADRACE_GATEWAY_HOST": config.host,
        "HEADRACE_GATEWAY_PORT": str(config.port),
        "HEADRACE_GATEWAY_FD": str(fd),
        "HEADRACE_GATEWAY_METRICS_FD": str(metrics_fd),
        "HEADRACE_GATEWAY_SUPERVISOR_FD": str(supervisor_fd),
        "HEADRACE_GATEWAY_DRAIN_TIMEOUT": str(config.drain_timeout),
        "HEADRACE_GATEWAY_LOG_FORMAT": "json",
        **_sealing("GATEWAY", config),
    }
    argv = (sys.executable, "-m", "headrace_gateway", *config.arguments.gateway)
    return _spec(f"gateway-{index}", argv, env, config, fds=(fd, metrics_fd, supervisor_fd))


def _sealing(process: str, config: UpConfig) -> dict[str, str]:
    """The variables of sealing; without the flag, those in the environment are used."""
    if config.sealing_keys_file is None:
        return {}
    return {f"HEADRACE_{process}_SEALING_KEYS_FILE": str(config.sealing_keys_file.absolute())}


def _spec(
    name: str,
    argv: tuple[str, ...],
    env: dict[str, str],
    config: UpConfig,
    fds: tuple[int, ...],
) -> ChildSpec:
    return ChildSpec(
        name=name,
        argv=argv,
        env={"PYTHONUNBUFFERED": "1", **env},
        pass_fds=fds,
        drain_seconds=config.drain_timeout + _DRAIN_MARGIN,
    )
