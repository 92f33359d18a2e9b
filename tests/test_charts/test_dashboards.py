"""The dashboards' files match their code, show every metric, and show no metric that does not
exist."""

import json
import re
from typing import Any

import pytest

from dashboards import FOLDER, dashboards, files
from headrace_common.observability import metric_names as names
from headrace_common.observability.metric_names import ALL_METRICS, MetricKind
from headrace_dashboards import promql
from headrace_dashboards.panel import Dashboard, Look, Panel

DASHBOARDS = dashboards()
PANELS = [(each, panel) for each in DASHBOARDS for panel in each.panels]
SUFFIXES = {MetricKind.HISTOGRAM: ("_bucket", "_sum", "_count")}
EXPORTED = {
    metric.prometheus_name + suffix
    for metric in ALL_METRICS
    for suffix in SUFFIXES.get(metric.kind, ("",))
}
OTHERS = {
    promql.SLEEP_STATE,
    promql.REDIS_MEMORY_USED,
    promql.REDIS_MEMORY_MAX,
    promql.REDIS_COMMANDS,
    promql.PROCESS_CPU,
    promql.PROCESS_MEMORY,
}


def title(value: object) -> str | None:
    return getattr(value, "title", None)


@pytest.mark.parametrize("name", files())
def test_the_dashboard_file_matches_the_code(name: str) -> None:
    assert (FOLDER / name).read_text() == files()[name], "run `make generated`"


def test_there_is_no_other_file() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(files())


@pytest.mark.parametrize(("dashboard", "panel"), PANELS, ids=title)
def test_every_panel_has_a_description(dashboard: Dashboard, panel: Panel) -> None:
    assert panel.queries
    assert panel.description.endswith(".")


@pytest.mark.parametrize(("dashboard", "panel"), PANELS, ids=title)
def test_panels_use_only_exported_metrics(dashboard: Dashboard, panel: Panel) -> None:
    for query in panel.queries:
        queried = set(re.findall(r"([a-z_:]+)\{", query.expr))

        assert queried
        assert queried <= EXPORTED | OTHERS


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=title)
def test_titles_are_unique(dashboard: Dashboard) -> None:
    titles = [panel.title for panel in dashboard.panels]

    assert len(set(titles)) == len(titles)


def test_every_metric_is_on_a_dashboard() -> None:
    shown = " ".join(query.expr for _, panel in PANELS for query in panel.queries)

    assert [metric.name for metric in ALL_METRICS if metric.prometheus_name not in shown] == []


@pytest.mark.parametrize("name", files())
def test_panels_fill_their_rows_without_overlap(name: str) -> None:
    cells: set[tuple[int, int]] = set()
    for panel in panels_of(name):
        place = panel["gridPos"]
        own = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert all(x < 24 for x, _ in own), panel["title"]
        assert cells.isdisjoint(own), panel["title"]
        cells |= own

    rows = {y for _, y in cells}
    assert cells == {(x, y) for x in range(24) for y in rows}


@pytest.mark.parametrize("name", files())
def test_every_panel_takes_the_chosen_data_source(name: str) -> None:
    panels = [panel for panel in panels_of(name) if panel["type"] != "row"]

    assert panels
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
    ids = [panel["id"] for panel in panels_of(name)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", files())
def test_namespace_and_model_can_be_chosen(name: str) -> None:
    variables = {each["name"]: each for each in json.loads(files()[name])["templating"]["list"]}

    assert list(variables) == ["datasource", "namespace", "model"]
    for chosen in ("namespace", "model"):
        assert variables[chosen]["includeAll"]
        assert variables[chosen]["multi"]
        assert variables[chosen]["allValue"] == ".*"


def test_the_overview_has_ten_panels_that_link_to_rows_of_the_others() -> None:
    overview = DASHBOARDS[0]
    rows = {(each.name, row.title) for each in DASHBOARDS[1:] for row in each.rows}
    details = [panel.details for panel in overview.panels if panel.details is not None]

    assert len(details) == len(overview.panels) == 10
    assert {(each.dashboard, each.row) for each in details} <= rows
    for panel in panels_of("overview.json"):
        if panel["type"] != "row":
            (link,) = panel["links"]
            assert f"{link['url'].removeprefix('/d/headrace-').partition('?')[0]}.json" in files()


def test_heatmaps_show_buckets() -> None:
    heatmaps = [panel for _, panel in PANELS if panel.look is Look.HEATMAP]

    assert heatmaps
    for panel in heatmaps:
        assert all(
            "_bucket{" in query.expr and "sum by (le)" in query.expr for query in panel.queries
        )


def test_the_queue_is_never_added_up_over_gateways() -> None:
    gauges = (names.QUEUE_DEPTH, names.QUEUE_PENDING, names.QUEUE_TOKENS, names.QUEUE_OLDEST_AGE)
    expressions = [query.expr for _, panel in PANELS for query in panel.queries]

    for gauge in gauges:
        used = [text for text in expressions if f"{gauge.prometheus_name}{{" in text]
        assert used
        assert all(text.startswith("max") for text in used)


def panels_of(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(files()[name])["panels"]
    return found
