"""The processes that `up` runs, and their settings. Pure: nothing is started or read here."""

import difflib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace_common.text.checkpoint import DEMO_MODEL, default_name
from headrace_common.wire.messages import MAX_ID_CHARS

from ..errors import UsageError
from ..processes.child import ChildSpec
from ..sockets import client_host

_DRAIN_MARGIN = 15.0  # beyond the child's own budget, before it is killed
_BEFORE_DASHES = "give it to `headrace up` itself, before the two dashes"
_SET_BY_UP = "`headrace up` chooses it for each process; see the log files in the data folder"
_OWN_FLAGS = {
    "--model": _BEFORE_DASHES,
    "--served-model-name": _BEFORE_DASHES,
    "--drain-timeout": _BEFORE_DASHES,
    "--sealing-keys-file": _BEFORE_DASHES,
    "--redis-url": "use --redis before the two dashes",
    "--metrics-host": _SET_BY_UP,
    "--metrics-port": _SET_BY_UP,
    "--metrics-fd": _SET_BY_UP,
    "--display-name": _SET_BY_UP,
    "--log-format": _SET_BY_UP,
}
_MISSPELLED = 0.8  # a flag that is this similar to another one counts as a misspelling
_ADAPTERS = "--lora-modules"
_THREADS = "HEADRACE_ENGINE_THREADS"
_RANKS = "HEADRACE_ENGINE_TENSOR_PARALLEL_SIZE"


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
    engine_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.model_name) > MAX_ID_CHARS:
            raise UsageError(
                f"the model's name has over {MAX_ID_CHARS} characters",
                "give a shorter one with --served-model-name",
            )

    @property
    def model_name(self) -> str:
        """The name that clients use for the model: by default the last part of its path or hub
        id."""
        return self.served_model_name or default_name(self.model)

    @property
    def url(self) -> str:
        return f"http://{client_host(self.host)}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostResources:
    """The resources that engines share: GPUs as in CUDA_VISIBLE_DEVICES, and CPU cores."""

    gpus: Sequence[str] = ()
    cores: int = 1
    environ: Mapping[str, str] = field(default_factory=dict)

    def env(self, index: int, config: UpConfig) -> dict[str, str]:
        """Variables that divide the resources among several engines; one engine gets all."""
        if config.engines == 1:
            return {}
        ranks = self._ranks(config.engine_args)
        if self.gpus:
            first = index % max(1, len(self.gpus) // ranks) * ranks
            return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus[first : first + ranks])}
        if _THREADS in self.environ or any(a.startswith("--threads") for a in config.engine_args):
            return {}
        return {_THREADS: str(max(1, self.cores // (config.engines * ranks)))}

    def _ranks(self, engine_args: Sequence[str]) -> int:
        """The processes of one engine, each with a GPU. The engine refuses an invalid number."""
        words = " ".join(engine_args).replace("=", " ").split()
        found = self.environ.get(_RANKS, "1")
        for flag, value in zip(words, words[1:], strict=False):
            found = value if flag == "--tensor-parallel-size" else found
        return max(1, int(found)) if found.isdecimal() else 1


def checked_engine_args(args: Sequence[str], own: Iterable[str] = ()) -> tuple[str, ...]:
    """The flags for the engines; `own` are the flags of `up` itself.

    Raises UsageError for flags that `up` must set itself, and for misspellings of its own flags.
    The engines refuse other unknown flags.
    """
    if args and not args[0].startswith("-"):
        raise UsageError(f"unexpected argument {args[0]!r}", "a model is given with --model")
    for arg in args:
        flag = arg.partition("=")[0]
        if flag in _OWN_FLAGS:
            raise UsageError(f"{flag} cannot be given to the engines", _OWN_FLAGS[flag])
        close = difflib.get_close_matches(flag, own, n=1, cutoff=_MISSPELLED)
        if close and flag.startswith("--"):
            raise UsageError(f"there is no flag {flag}", f"did you mean {close[0]}?")
    return tuple(args)


def adapter_names(engine_args: Sequence[str]) -> list[str]:
    """The LoRA adapters in these flags of engines; engines refuse malformed ones."""
    names: dict[str, None] = {}
    for flag, value in zip(engine_args, [*engine_args[1:], ""], strict=False):
        name, equals, own = flag.partition("=")
        if name == _ADAPTERS:
            names |= dict.fromkeys(filter(None, _names(own if equals else value)))
    return list(names)


def _names(modules: str) -> list[str]:
    """The names in name=folder,name=folder or in a JSON object."""
    try:
        found = json.loads(modules)
    except ValueError:
        found = [pair.partition("=")[0] for pair in modules.split(",")]
    return [str(name) for name in found] if isinstance(found, dict | list) else []


def engine_spec(
    index: int, config: UpConfig, *, redis_url: str, metrics_fd: int, resources: HostResources
) -> ChildSpec:
    """An engine's process. The listening socket `metrics_fd` outlives it, to keep its port."""
    name = f"engine-{index}"
    env = {
        "HEADRACE_ENGINE_REDIS_URL": redis_url,
        "HEADRACE_ENGINE_MODEL": config.model,
        "HEADRACE_ENGINE_SERVED_MODEL_NAME": config.model_name,
        # The gateways have the model in their settings; a registration would outlive this run.
        "HEADRACE_ENGINE_REGISTER_MODEL": "false",
        "HEADRACE_ENGINE_METRICS_FD": str(metrics_fd),
        "HEADRACE_ENGINE_DEBUG_PAGES": "true",  # its metrics port is on loopback
        "HEADRACE_ENGINE_DRAIN_TIMEOUT": str(config.drain_timeout),
        "HEADRACE_ENGINE_LOG_FORMAT": "json",
        "HEADRACE_ENGINE_DISPLAY_NAME": name,
        **_sealing("ENGINE", config),
        **resources.env(index, config),
    }
    argv = (sys.executable, "-m", "headrace_engine", *config.engine_args)
    return _spec(name, argv, env, config, fds=(metrics_fd,))


def gateway_spec(
    index: int, config: UpConfig, *, redis_url: str, metrics_fd: int, fd: int, supervisor_fd: int
) -> ChildSpec:
    """A gateway's process. All gateways share the socket `fd`; the others are its own."""
    env = {
        "HEADRACE_GATEWAY_REDIS_URL": redis_url,
        "HEADRACE_GATEWAY_MODEL": config.model,
        "HEADRACE_GATEWAY_SERVED_MODEL_NAME": config.model_name,
        "HEADRACE_GATEWAY_LORA_MODULES": json.dumps(adapter_names(config.engine_args)),
        "HEADRACE_GATEWAY_HOST": config.host,
        "HEADRACE_GATEWAY_PORT": str(config.port),
        "HEADRACE_GATEWAY_FD": str(fd),
        "HEADRACE_GATEWAY_METRICS_FD": str(metrics_fd),
        "HEADRACE_GATEWAY_SUPERVISOR_FD": str(supervisor_fd),
        "HEADRACE_GATEWAY_DRAIN_TIMEOUT": str(config.drain_timeout),
        "HEADRACE_GATEWAY_LOG_FORMAT": "json",
        **_sealing("GATEWAY", config),
    }
    argv = (sys.executable, "-m", "headrace_gateway")
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
