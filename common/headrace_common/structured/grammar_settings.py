"""The settings of grammar checks, which gateways and engines share."""

from typing import Annotated, Protocol

from pydantic import ByteSize, Field

from ..pools.limited_pool import TaskLimits

Workers = Annotated[
    int,
    Field(
        ge=1,
        le=64,
        description="processes that check schemas, expressions and grammars; one tenant gets at "
        "most all but one of them",
    ),
]
Timeout = Annotated[
    float, Field(gt=0, description="seconds that the check of one grammar may take")
]
CpuSeconds = Annotated[
    int, Field(ge=1, description="seconds of a processor that the check of one grammar may take")
]
Memory = Annotated[
    ByteSize,
    Field(
        ge=16 * 2**20,
        description="memory that the check of one grammar may take in its process, such as 128MiB",
    ),
]

WORKERS = 2
_LIMITS = TaskLimits()
TIMEOUT = _LIMITS.timeout
CPU_SECONDS = _LIMITS.cpu_seconds
MEMORY = ByteSize(_LIMITS.memory_bytes)


class GrammarSettings(Protocol):
    """The settings of grammar checks in a process's settings."""

    @property
    def grammar_timeout(self) -> float: ...
    @property
    def grammar_cpu_seconds(self) -> int: ...
    @property
    def grammar_memory(self) -> ByteSize: ...


def task_limits(settings: GrammarSettings) -> TaskLimits:
    """The limits of one check."""
    return TaskLimits(
        timeout=settings.grammar_timeout,
        cpu_seconds=settings.grammar_cpu_seconds,
        memory_bytes=int(settings.grammar_memory),
    )
