"""Writes the pages that are made from code or other files: metrics, ModelService, chart values,
and the list of decisions.

A test compares the pages with those made here; `make generated` renews them.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from headrace_common.observability.metric_names import (
    ENGINE_METRICS,
    GATEWAY_METRICS,
    OPERATOR_METRICS,
    Metric,
)
from headrace_operator.spec.schema import definition

ROOT = Path(__file__).resolve().parents[4]
DOCS = ROOT / "docs"
VALUES = ROOT / "charts" / "headrace" / "values.yaml"
_RENEWED = "`make generated` writes this page from {source}."
METRICS = f"""\
# Metrics

Names are as on the Prometheus endpoint. OpenTelemetry's names have dots where these have
underscores, and neither the unit nor `_total` at the end. A histogram has the series `_bucket`,
`_sum` and `_count`. [Operations](operations.md#where-to-look) says where to read metrics, and which
of vLLM's names have a counterpart here.

{_RENEWED.format(source="the list of metrics")}
"""
MODEL_SERVICE = f"""\
# ModelService

The fields of a ModelService (`headrace.dev/v1alpha1`). [Operations](operations.md#modelservice) has
an example, and [autoscaling](autoscaling.md) explains `spec.scaling`. On a cluster,
`kubectl explain ms.spec --recursive` shows the same.

{_RENEWED.format(source="the custom resource definition")}
"""
CHART_VALUES = f"""\
# Chart values

The values of the chart `charts/headrace`. [The chart's README](../charts/headrace/README.md)
explains how they work together. An unknown or invalid value is refused by name.

{_RENEWED.format(source="`values.yaml`")}
"""
DECISIONS = f"""\
# Decisions

Each page has one decision: what was chosen, why, what it costs, and what was not chosen.

{_RENEWED.format(source="the pages' titles")}
"""


def pages() -> dict[Path, str]:
    """The generated pages by path."""
    return {
        DOCS / "metrics.md": metrics_page(),
        DOCS / "model-service.md": model_service_page(),
        DOCS / "chart-values.md": chart_values_page(),
        DOCS / "decisions" / "README.md": decisions_page(),
    }


def metrics_page() -> str:
    processes = {
        "Gateway": GATEWAY_METRICS,
        "Engine": ENGINE_METRICS,
        "Operator": OPERATOR_METRICS,
    }
    head = ("metric", "kind", "unit", "meaning")
    sections = [
        _section(process, head, map(_metric_row, metrics)) for process, metrics in processes.items()
    ]
    return "\n".join([METRICS, *sections])


def model_service_page() -> str:
    version = definition()["spec"]["versions"][0]
    fields = version["schema"]["openAPIV3Schema"]["properties"]
    head = ("field", "type", "meaning")
    sections = [
        _section(part, head, _field_rows(fields[part].get("properties", {}), part))
        for part in ("spec", "status")
    ]
    return "\n".join([MODEL_SERVICE, *sections])


def chart_values_page() -> str:
    text = VALUES.read_text()
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    table = _table(("value", "default", "meaning"), _value_rows(root, text.splitlines()))
    return "\n".join([CHART_VALUES, *table, ""])


def decisions_page() -> str:
    lines = []
    for page in sorted(DOCS.glob("decisions/0*.md")):
        title = page.read_text().partition("\n")[0].removeprefix("# ")
        number, _, decision = title.partition(". ")
        lines.append(f"- [{number}]({page.name}). {decision}")
    return "\n".join([DECISIONS, *lines, ""])


def _section(title: str, head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    return "\n".join([f"## {title}", "", *_table(head, rows), ""])


def _table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def _metric_row(metric: Metric) -> Sequence[str]:
    kind = metric.kind.value.replace("_", "-")
    return f"`{metric.prometheus_name}`", kind, f"`{metric.unit}`", metric.description


def _field_rows(fields: Mapping[str, Any], path: str) -> Iterator[Sequence[str]]:
    """A row for each field, parents before their children; `[]` is an element of a list."""
    for name, field in fields.items():
        at = f"{path}.{name}"
        yield f"`{at}`", _kind(field), field.get("description", "")
        element = field.get("items", {})
        yield from _field_rows(field.get("properties", {}), at)
        yield from _field_rows(element.get("properties", {}), f"{at}[]")


def _kind(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{_compact(value)}`" for value in field["enum"])
    if field.get("x-kubernetes-int-or-string"):
        return "number or string"
    kind = str(field.get("type", "any"))
    return f"list of {_kind(field['items'])}s" if kind == "array" else kind


def _value_rows(
    node: yaml.MappingNode, lines: Sequence[str], path: str = ""
) -> Iterator[Sequence[str]]:
    """A row for each value that has a line `# --` above it, in the order of the file."""
    for key, value in node.value:
        at = f"{path}.{key.value}" if path else str(key.value)
        above = lines[key.start_mark.line - 1].strip()
        if above.startswith("# -- "):
            default = yaml.safe_load(yaml.serialize(value))
            yield f"`{at}`", f"`{_compact(default)}`", above.removeprefix("# -- ")
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield from _value_rows(value, lines, at)


def _compact(value: object) -> str:
    """The value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("...\n").strip()


def write() -> None:
    for page, text in pages().items():
        page.write_text(text)


if __name__ == "__main__":
    write()
