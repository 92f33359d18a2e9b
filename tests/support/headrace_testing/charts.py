"""The Helm chart rendered in this process, and queries on the result.

Rendering costs a tenth of a second: results are kept by their values and must not be changed.
`python -m headrace_testing.charts` renews the snapshot of the default render.
"""

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "charts" / "headrace"
RULES = CHART / "rules" / "alerts.yaml"
SNAPSHOT = ROOT / "tests" / "test_charts" / "snapshot.yaml"
SCENARIOS = tuple(sorted(path.stem for path in (CHART / "ci").glob("*-values.yaml")))
RELEASE, NAMESPACE = "headrace", "llm"
# Generated elsewhere and compared there: too long to review here.
NOT_IN_SNAPSHOT = ("templates/crds/", "templates/monitoring/dashboards.yaml", "templates/NOTES.txt")

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """A pod, or an object with a pod template."""

    name: str
    manifest: Manifest

    @property
    def pod(self) -> Manifest:
        """The pod's metadata and spec."""
        if self.manifest["kind"] == "Pod":
            return self.manifest
        template: Manifest = self.manifest["spec"]["template"]
        return template

    @property
    def spec(self) -> Manifest:
        spec: Manifest = self.pod["spec"]
        return spec

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.pod["metadata"]["labels"]
        return labels

    @property
    def containers(self) -> list[Manifest]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    @property
    def environment(self) -> dict[str, Manifest]:
        """Variables of its first container by name. Fails if a name is given twice."""
        variables = self.containers[0].get("env", [])
        found = {variable["name"]: variable for variable in variables}
        assert len(found) == len(variables), f"{self.name} has a variable twice"
        return found


def scenario(name: str) -> Manifest:
    """The values of ci/<name>.yaml."""
    return yaml.safe_load((CHART / "ci" / f"{name}.yaml").read_text()) or {}


def render_files(values: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Template path below the chart -> text. Raises helm_python's errors."""
    return dict(_rendered(json.dumps(values or {}, sort_keys=True)))


def render(values: Mapping[str, Any] | None = None) -> list[Manifest]:
    """All objects, definitions included."""
    return list(_objects(json.dumps(values or {}, sort_keys=True)))


@cache
def _rendered(values: str) -> tuple[tuple[str, str], ...]:
    given = json.loads(values)
    # The only value without a default.
    given["image"] = {"repository": "headrace", **given.get("image", {})}
    with Chart.load(CHART) as chart:
        files = chart.render(given, name=RELEASE, namespace=NAMESPACE)
    prefix = "headrace/"
    return tuple((path.removeprefix(prefix), text) for path, text in sorted(files.items()))


@cache
def _objects(values: str) -> tuple[Manifest, ...]:
    return tuple(
        document
        for path, text in _rendered(values)
        if not path.endswith("NOTES.txt")
        for document in _documents(text)
    )


@cache
def _documents(text: str) -> tuple[Manifest, ...]:
    """The objects of a rendered template, which is often the same for other values."""
    return tuple(found for found in yaml.load_all(text, yaml.CSafeLoader) if found is not None)


def rules() -> list[Manifest]:
    """The chart's alerting and recording rules."""
    (found,) = _documents(RULES.read_text())
    return [rule for group in found["groups"] for rule in group["rules"]]


def of_kind(objects: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in objects if manifest["kind"] == kind]


def named(objects: list[Manifest], kind: str, name: str) -> Manifest:
    """The only object of a kind and name."""
    (found,) = (m for m in of_kind(objects, kind) if m["metadata"]["name"] == name)
    return found


def workloads(objects: list[Manifest]) -> list[Workload]:
    kinds = ("Deployment", "StatefulSet", "DaemonSet", "Job", "Pod")
    return [Workload(m["metadata"]["name"], m) for m in objects if m["kind"] in kinds]


def workload(objects: list[Manifest], name: str) -> Workload:
    (found,) = (each for each in workloads(objects) if each.name == name)
    return found


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return selector.items() <= labels.items()


def plain_secrets(objects: list[Manifest]) -> dict[str, dict[str, str]]:
    """Secret name -> decoded data."""
    return {
        secret["metadata"]["name"]: {
            key: base64.b64decode(value).decode() for key, value in secret["data"].items()
        }
        for secret in of_kind(objects, "Secret")
    }


def keys_of(tree: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of every key of nested mappings, parents first."""
    for key, value in tree.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from keys_of(value, (*path, key))


def snapshot() -> str:
    """The default render with generated passwords masked, in the order of its files."""
    parts = []
    for path, text in render_files().items():
        if not text.strip() or path.startswith(NOT_IN_SNAPSHOT):
            continue
        documents = map(_without_values, _documents(text))
        body = yaml.safe_dump_all(documents, sort_keys=False, width=100, allow_unicode=True)
        parts.append(f"---\n# {path}\n{body}")
    return "".join(parts)


def _without_values(document: Manifest) -> Manifest:
    """The object; a Secret's values differ between renders and are masked."""
    if document["kind"] != "Secret":
        return document
    return {**document, "data": dict.fromkeys(document["data"], "generated")}


def main() -> None:
    SNAPSHOT.write_text(snapshot())


if __name__ == "__main__":
    main()
