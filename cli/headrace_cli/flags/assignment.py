"""Gives each flag of `headrace up` to the processes that have it, and checks all values."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError
from .flag import Arity, Flag
from .process_settings import Process, ProcessSettings

_CHOSEN = "`headrace up` chooses it for each process"
_BY_UP = {
    "redis_url": "use --redis",
    "display_name": _CHOSEN,
    "metrics_host": _CHOSEN,
    "metrics_port": f"{_CHOSEN}, and prints it once ready",
    "metrics_fd": _CHOSEN,
    "supervisor_fd": _CHOSEN,
    "fd": _CHOSEN,
    "log_format": f"{_CHOSEN}; see the log files in the data folder",
}
# Gateways need only the names of the engines' adapters.
_OF_ENGINES = ("lora_modules",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessArguments:
    """The command lines of engines and gateways, and what `up` must know of the engines.

    `threads` None means that engines may use all cores. `api_keys` says whether requests need a
    key, `console` whether gateways serve the console.
    """

    engine: tuple[str, ...] = ()
    gateway: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    tensor_parallel_size: int = 1
    nnodes: int = 1
    threads: int | None = None
    api_keys: bool = False
    console: bool = True


ENGINE = ProcessSettings(Process.ENGINE)
GATEWAY = ProcessSettings(Process.GATEWAY)


def known_flags() -> dict[str, Arity]:
    """The flags of engines and gateways together."""
    return {**GATEWAY.arities, **ENGINE.arities}


def owner(name: str) -> str:
    """The command that has the flag of this setting."""
    found = (process.program for process in (ENGINE, GATEWAY) if name in process.names)
    return next(found, "headrace up")


def assigned(flags: Sequence[Flag], own: Sequence[Flag]) -> ProcessArguments:
    """The arguments of each process. `own` are flags of `up` itself that it passes to both.

    Raises UsageError for flags that `up` must choose itself, and for invalid values of flags or of
    the environment.
    """
    for flag in flags:
        if remedy := _BY_UP.get(flag.name):
            raise UsageError(f"{flag.typed} cannot be given to `headrace up`", remedy)
    engine = [flag for flag in flags if flag.name in ENGINE.names]
    gateway = [f for f in flags if f.name in GATEWAY.names and f.name not in _OF_ENGINES]
    settings = ENGINE.read([*own, *engine])
    if settings.node_rank:
        raise UsageError(
            f"--node-rank {settings.node_rank} has no gateway or queue, which `headrace up` starts",
            "use `headrace engine`, and `headrace up` on node 0 only",
        )
    adapters = tuple(settings.lora_modules)
    served = GATEWAY.read([*own, *gateway, Flag("lora_modules", json.dumps(adapters), "")])
    return ProcessArguments(
        engine=tuple(ENGINE.words(engine)),
        gateway=tuple(GATEWAY.words(gateway)),
        adapters=adapters,
        tensor_parallel_size=settings.tensor_parallel_size,
        nnodes=settings.nnodes,
        threads=settings.threads,
        api_keys=served.api_keys_file is not None,
        console=served.console,
    )
