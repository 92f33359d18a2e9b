"""A flag as it was given, and how many values a flag has."""

from dataclasses import dataclass
from enum import Enum


class Arity(Enum):
    """The values that follow a flag on the command line."""

    SWITCH = "none, or true or false after ="
    ONE = "one"
    MANY = "one or more, up to the next flag"


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. `name` is a setting's, as max_model_len; `typed` is what the person wrote.

    A flag with several values is several flags. A switch's value is `true` or `false`.
    """

    name: str
    value: str
    typed: str

    @property
    def on(self) -> bool:
        return self.value != "false"

    def word(self, switch: bool) -> str:
        """The flag as a process takes it."""
        if switch:
            return option(self.name) if self.on else option(f"no_{self.name}")
        return f"{option(self.name)}={self.value}"


def option(name: str) -> str:
    """The flag of a setting: --max-model-len of max_model_len."""
    return f"--{name.replace('_', '-')}"
