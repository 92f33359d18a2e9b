"""Writes the chart's dashboards: charts/headrace/dashboards/*.json. Run by `make generated`."""

from collections.abc import Mapping
from pathlib import Path

from headrace_dashboards import engines, overview, scaling, service
from headrace_dashboards.grafana import as_json
from headrace_dashboards.panel import Dashboard

FOLDER = Path(__file__).resolve().parent.parent / "headrace" / "dashboards"


def dashboards() -> tuple[Dashboard, ...]:
    return overview.dashboard(), service.dashboard(), engines.dashboard(), scaling.dashboard()


def files() -> Mapping[str, str]:
    """Content by file name."""
    return {f"{dashboard.name}.json": as_json(dashboard) for dashboard in dashboards()}


def main() -> None:
    for name, content in files().items():
        (FOLDER / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
