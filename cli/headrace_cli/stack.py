"""Which processes `up` runs and with what settings; pure: nothing is started or read here."""

import difflib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace_common.checkpoint import DEMO_MODEL, default_name
from headrace_common.messages import MAX_ID_CHARS

from .child import ChildSpec
from .errors import UsageError
from .sockets import client_host

_DRAIN_MARGIN = 15.0  # beyond the child's own budget, before it is killed
_BEFORE = "give it to `headrace up` itself, before the two dashes"
_CHOSEN = "`headrace up` chooses it for each process; see the log files in the data folder"
_OWN_FLAGS = {
    "--model": _BEFORE,
    "--served-model-name": _BEFORE,
    "--drain-timeout": _BEFORE,
    "--redis-url": "use --redis before the two dashes",
    "--metrics-host": _CHOSEN,
    "--metrics-port": _CHOSEN,
    "--metrics-fd": _CHOSEN,
    "--log-format": _CHOSEN,
}
_SLIP = 0.8  # so alike are two flags of which one is meant
_ADAPTERS = "--lora-modules"
_THREADS = "HEADRACE_ENGINE_THREADS"
_RANKS = "HEADRACE_ENGINE_TENSOR_PARALLEL_SIZE"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """What a person asked `up` for: `model` is a folder, a hub id or DEMO_MODEL; seconds.

    Raises UsageError for a name that requests could not carry.
    """

    model: str = DEMO_MODEL
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    engines: int = 1
    gateways: int = 1
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
        """What clients call the model: by default the last part of its path or hub id."""
        return self.served_model_name or default_name(self.model)

    @property
    def url(self) -> str:
        return f"http://{client_host(self.host)}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What engines share: GPUs by the names CUDA_VISIBLE_DEVICES takes, and CPU cores."""

    gpus: Sequence[str] = ()
    cores: int = 1
    environ: Mapping[str, str] = field(default_factory=dict)

    def env(self, index: int, config: UpConfig) -> dict[str, str]:
        """Variables that keep several engines out of each other's way; one engine takes all."""
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
        """Processes of one engine, each with a GPU. What is no number the engine will refuse."""
        words = " ".join(engine_args).replace("=", " ").split()
        found = self.environ.get(_RANKS, "1")
        for flag, value in zip(words, words[1:], strict=False):
            found = value if flag == "--tensor-parallel-size" else found
        return max(1, int(found)) if found.isdecimal() else 1


def checked_engine_args(args: Sequence[str], own: Iterable[str] = ()) -> tuple[str, ...]:
    """What goes to the engines; `own` are the flags of `up` itself.

    Raises UsageError for what `up` has to know or to choose itself, and what looks like a slip in
    one of its flags. Other flags that there are not the engines will refuse.
    """
    if args and not args[0].startswith("-"):
        raise UsageError(f"unexpected argument {args[0]!r}", "a model is given with --model")
    for arg in args:
        flag = arg.partition("=")[0]
        if flag in _OWN_FLAGS:
            raise UsageError(f"{flag} cannot be given to the engines", _OWN_FLAGS[flag])
        close = difflib.get_close_matches(flag, own, n=1, cutoff=_SLIP)
        if close and flag.startswith("--"):
            raise UsageError(f"there is no flag {flag}", f"did you mean {close[0]}?")
    return tuple(args)


def adapter_names(engine_args: Sequence[str]) -> list[str]:
    """The LoRA adapters that engines get with these flags; what is malformed they will refuse."""
    names: dict[str, None] = {}
    for flag, value in zip(engine_args, [*engine_args[1:], ""], strict=False):
        name, equals, own = flag.partition("=")
        if name == _ADAPTERS:
            names |= dict.fromkeys(filter(None, _names(own if equals else value)))
    return list(names)


def _names(modules: str) -> list[str]:
    """Of name=folder,name=folder or of an object in JSON."""
    try:
        found = json.loads(modules)
    except ValueError:
        found = [pair.partition("=")[0] for pair in modules.split(",")]
    return [str(name) for name in found] if isinstance(found, dict | list) else []


def engine_spec(
    index: int, config: UpConfig, *, redis_url: str, metrics_fd: int, placement: Placement
) -> ChildSpec:
    """`metrics_fd` is a listening socket that outlives the engine, so that its port stays."""
    env = {
        "HEADRACE_ENGINE_REDIS_URL": redis_url,
        "HEADRACE_ENGINE_MODEL": config.model,
        "HEADRACE_ENGINE_SERVED_MODEL_NAME": config.model_name,
        # Our gateways are told of it; a registration would outlive this run and be theirs for ever.
        "HEADRACE_ENGINE_REGISTER_MODEL": "false",
        "HEADRACE_ENGINE_METRICS_FD": str(metrics_fd),
        "HEADRACE_ENGINE_DEBUG_PAGES": "true",  # its metrics port is on loopback
        "HEADRACE_ENGINE_DRAIN_TIMEOUT": str(config.drain_timeout),
        "HEADRACE_ENGINE_LOG_FORMAT": "json",
        **placement.env(index, config),
    }
    argv = (sys.executable, "-m", "headrace_engine", *config.engine_args)
    return _spec(f"engine-{index}", argv, env, config, fds=(metrics_fd,))


def gateway_spec(
    index: int, config: UpConfig, *, redis_url: str, metrics_fd: int, fd: int
) -> ChildSpec:
    """`fd` is the listening socket that all gateways share, `metrics_fd` one of its own."""
    env = {
        "HEADRACE_GATEWAY_REDIS_URL": redis_url,
        "HEADRACE_GATEWAY_MODEL": config.model,
        "HEADRACE_GATEWAY_SERVED_MODEL_NAME": config.model_name,
        "HEADRACE_GATEWAY_LORA_MODULES": json.dumps(adapter_names(config.engine_args)),
        "HEADRACE_GATEWAY_HOST": config.host,
        "HEADRACE_GATEWAY_PORT": str(config.port),
        "HEADRACE_GATEWAY_FD": str(fd),
        "HEADRACE_GATEWAY_METRICS_FD": str(metrics_fd),
        "HEADRACE_GATEWAY_DRAIN_TIMEOUT": str(config.drain_timeout),
        "HEADRACE_GATEWAY_LOG_FORMAT": "json",
    }
    argv = (sys.executable, "-m", "headrace_gateway")
    return _spec(f"gateway-{index}", argv, env, config, fds=(fd, metrics_fd))


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
