"""Dashboards as Grafana's JSON, made by Grafana's own builders. The schema is that of Grafana 10.1,
which later versions also read."""

import json
from string import ascii_uppercase

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heatmap_models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from .panel import Dashboard, Details, Look, Panel, Query, Row, Variable

_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_ALL = models.VariableOption(text="All", value="$__all")


def as_json(dashboard: Dashboard) -> str:
    """The file that Grafana imports. The same dashboard always gives the same text."""
    built = _dashboard(dashboard).build()
    return json.dumps(built, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _dashboard(dashboard: Dashboard) -> builders.Dashboard:
    built = builders.Dashboard(dashboard.title)
    built.uid(f"headrace-{dashboard.name}").description(dashboard.description)
    built.tags([*dashboard.tags]).editable().refresh("30s").time("now-1h", "now")
    built.timezone("browser").tooltip(models.DashboardCursorSync.CROSSHAIR)
    built.link(_others())
    built.with_variable(
        builders.DatasourceVariable("datasource").label("Data source").type("prometheus")
    )
    for variable in dashboard.variables:
        built.with_variable(_variable(variable))
    number = 0
    for row in dashboard.rows:
        built.with_row(_row(row).id(number := number + 1))
        for panel in row.panels:
            built.with_panel(_numbered(panel, number := number + 1))
    return built


def _others() -> builders.DashboardLink:
    link = builders.DashboardLink("Headrace").type(models.DashboardLinkType.DASHBOARDS)
    return link.tags(["headrace"]).as_dropdown(True).include_vars(True).keep_time(True)


def _variable(variable: Variable) -> "_AnyValue":
    built = _AnyValue(variable.name).label(variable.label).datasource(_SOURCE)
    built.query(variable.query).multi(True).include_all(True).current(_ALL)
    built.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    return built.sort(models.VariableSort.ALPHABETICAL_ASC)


class _AnyValue(builders.QueryVariable):
    """A variable whose "All" also includes series without the label; the builder cannot express
    that."""

    def build(self) -> models.VariableModel:
        built = super().build()
        built.all_value = ".*"
        return built


def _row(row: Row) -> builders.Row:
    return builders.Row(row.title)


_Built = timeseries.Panel | heatmap.Panel | stat.Panel


def _numbered(panel: Panel, number: int) -> Builder[models.Panel]:
    built = _panel(panel)
    built.id(number).title(panel.title).description(panel.description)
    built.datasource(_SOURCE).unit(panel.unit.value).span(panel.width).height(panel.height)
    if panel.details is not None:
        built.links([_details(panel.details)])
    for name, query in zip(ascii_uppercase, panel.queries, strict=False):
        built.with_target(_target(query, name, panel.look))
    return built


def _details(details: Details) -> builders.DashboardLink:
    """A link that keeps the chosen time, namespaces and models."""
    url = f"/d/headrace-{details.dashboard}?${{__url_time_range}}&${{__all_variables}}"
    title = f"{details.dashboard.capitalize()}: {details.row}"
    return builders.DashboardLink(title).type(models.DashboardLinkType.LINK).url(url)


def _panel(panel: Panel) -> _Built:
    match panel.look:
        case Look.HEATMAP:
            return _heatmap(panel)
        case Look.STAT:
            return _stat(panel)
        case _:
            return _timeseries(panel)


def _target(query: Query, name: str, look: Look) -> prometheus.Dataquery:
    built = prometheus.Dataquery().expr(query.expr).ref_id(name).range()
    if look is Look.HEATMAP:
        return built.format(PromQueryFormat.HEATMAP).legend_format("{{le}}")
    return built.legend_format(query.legend or "__auto")


def _timeseries(panel: Panel) -> timeseries.Panel:
    legend = common_builders.VizLegendOptions().show_legend(True)
    legend.display_mode(common.LegendDisplayMode.LIST).placement(common.LegendPlacement.BOTTOM)
    tooltip = common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI)
    built = timeseries.Panel().legend(legend).tooltip(tooltip.sort(common.SortOrder.DESCENDING))
    built.min(0).line_width(1).fill_opacity(10).show_points(common.VisibilityMode.NEVER)
    if panel.maximum is not None:
        built.max(panel.maximum)
    if panel.look is not Look.LINES:
        stacking = common_builders.StackingConfig().mode(common.StackingMode.NORMAL)
        built.fill_opacity(50).stacking(stacking)
    if panel.look is Look.BARS:
        built.draw_style(common.GraphDrawStyle.BARS)
    return built


def _heatmap(panel: Panel) -> heatmap.Panel:
    color = heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME)
    color.scheme("Oranges").scale(heatmap_models.HeatmapColorScale.EXPONENTIAL).exponent(0.5).steps(
        64
    )
    axis = heatmap.YAxisConfig().unit(panel.unit.value).axis_placement(common.AxisPlacement.LEFT)
    built = heatmap.Panel().calculate(False).color(color).y_axis(axis).cell_gap(1)
    return built.filter_values(heatmap.FilterValueRange().le(1e-9)).show_tooltip().show_legend()


def _stat(panel: Panel) -> stat.Panel:
    steps = [models.Threshold(value=None, color="green")]
    if panel.warn is not None:
        steps.append(models.Threshold(value=panel.warn, color="yellow"))
    if panel.alarm is not None:
        steps.append(models.Threshold(value=panel.alarm, color="red"))
    thresholds = builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
    reduce = common_builders.ReduceDataOptions().calcs(["lastNotNull"])
    built = stat.Panel().thresholds(thresholds).reduce_options(reduce)
    return built.graph_mode(common.BigValueGraphMode.AREA).no_value("0")
