"""The contents of a dashboard as plain data, independent of Grafana."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Look(StrEnum):
    """How a panel is drawn."""

    LINES = "lines"
    STACKED = "stacked"
    BARS = "bars"
    HEATMAP = "heatmap"
    STAT = "stat"


class Unit(StrEnum):
    """Grafana's unit ids."""

    SECONDS = "s"
    PER_SECOND = "reqps"
    SHORT = "short"
    SHARE = "percentunit"
    BYTES = "bytes"
    BYTES_PER_SECOND = "binBps"
    TOKENS = "suffix: tok"
    TOKENS_PER_SECOND = "suffix: tok/s"


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and the name of each of its series with labels as `{{label}}`."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Details:
    """A row of another dashboard with the details of a panel."""

    dashboard: str
    row: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """`width` in Grafana's 24 columns, `height` in its rows. `maximum` fixes the axis' end.

    `warn` and `alarm` are values from which a stat turns yellow and red. The panel links to its
    `details`.
    """

    title: str
    description: str
    queries: Sequence[Query]
    unit: Unit = Unit.SHORT
    look: Look = Look.LINES
    width: int = 8
    height: int = 8
    maximum: float | None = None
    warn: float | None = None
    alarm: float | None = None
    details: Details | None = None


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A choice at the dashboard's top: the values that a label of a series has."""

    name: str
    label: str
    query: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """`name` is that of the file, and of the uid after `headrace-`."""

    name: str
    title: str
    description: str
    variables: Sequence[Variable]
    rows: Sequence[Row]
    tags: Sequence[str] = field(default=("headrace", "llm"))

    @property
    def panels(self) -> list[Panel]:
        return [panel for row in self.rows for panel in row.panels]
