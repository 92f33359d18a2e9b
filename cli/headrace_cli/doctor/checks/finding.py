"""The findings of one check of the doctor."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"  # works, but not as well as it could
    FAIL = "fail"  # `up` cannot work


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding. `remedy` says what to do; it is empty if there is nothing to do."""

    level: Level
    subject: str
    detail: str
    remedy: str = ""

    @property
    def data(self) -> dict[str, str]:
        """The finding as data for JSON."""
        return {
            "level": self.level.value,
            "check": self.subject,
            "found": self.detail,
            "remedy": self.remedy,
        }


def ok(subject: str, detail: str) -> Finding:
    return Finding(Level.OK, subject, detail)


def warning(subject: str, detail: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, subject, detail, remedy)


def fail(subject: str, detail: str, remedy: str) -> Finding:
    return Finding(Level.FAIL, subject, detail, remedy)
