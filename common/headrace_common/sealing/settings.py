"""The settings of sealing, which gateways and engines share."""

from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import Field

SealingMode = Literal["require", "accept", "open"]

KeysFile = Annotated[
    Path | None,
    Field(
        description="file of keys with which prompts and answers are sealed in Redis, read again "
        "when it changes; the same for all gateways and engines; default: none, and they "
        "are stored unsealed",
    ),
]
Mode = Annotated[
    SealingMode,
    Field(
        description="require: seal, and refuse what is not sealed; accept: seal, and read both; "
        "open: seal nothing, and read both. To switch sealing on, go from open to accept to "
        "require; change all processes before the next step",
    ),
]


class SealingSettings(Protocol):
    """The settings of sealing in a process's settings."""

    @property
    def sealing_keys_file(self) -> Path | None: ...
    @property
    def sealing_mode(self) -> SealingMode: ...
