"""`make images`, `push` and `chart-push`, with programs that only print what they would do; and the
README's and the chart's examples of commands in them."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from headrace_operator.spec.model_service import ModelService

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "charts" / "headrace" / "examples"
TARGETS = ("gateway", "operator", "engine")
VERSION = yaml.safe_load((ROOT / "charts" / "headrace" / "Chart.yaml").read_text())["appVersion"]


def make(target: str, *given: str) -> subprocess.CompletedProcess[str]:
    programs = ("IMAGE_BUILD=echo build", "IMAGE_TAG=echo tag", "IMAGE_PUSH=echo push")
    return subprocess.run(
        ["make", "--no-print-directory", target, *programs, "HELM=echo helm", *given],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_images_are_built_and_loaded_with_the_tag_that_the_chart_takes() -> None:
    lines = make("images", "IMAGE_LOAD=echo load").stdout.splitlines()
    expected = [
        line
        for target in TARGETS
        for line in (
            f"build --target {target} --tag headrace-{target}:{VERSION} .",
            f"load headrace-{target}:{VERSION}",
        )
    ]
    assert lines == expected


def test_a_build_that_fails_ends_it() -> None:
    done = make("images", "IMAGE_BUILD=false")
    assert done.returncode != 0
    assert done.stdout == ""


def test_images_are_pushed_under_the_registry_s_name() -> None:
    registry = "registry.example.com/team"
    lines = make("push", f"REGISTRY={registry}").stdout.splitlines()
    for target in TARGETS:
        image = f"headrace-{target}:{VERSION}"
        assert f"tag {image} {registry}/{image}" in lines
        assert f"push {registry}/{image}" in lines
    assert lines[-1] == f"install with --set image.repository={registry}/headrace"


def test_the_chart_is_packed_and_pushed() -> None:
    done = make("chart-push", "REGISTRY=registry.example.com/team", "HELM_FLAGS=--plain-http")
    assert "helm package charts/headrace --destination dist" in done.stdout
    wanted = "helm push dist/headrace-0.1.0.tgz oci://registry.example.com/team --plain-http"
    assert wanted in done.stdout


@pytest.mark.parametrize("target", ["push", "chart-push"])
def test_without_a_registry_nothing_is_pushed(target: str) -> None:
    done = make(target)
    assert done.returncode != 0
    assert done.stdout.startswith("REGISTRY is empty: name where images go, as REGISTRY=")


@pytest.mark.parametrize("name", ["demo", "gpu"])
def test_an_example_is_a_modelservice_that_the_operator_understands(name: str) -> None:
    body = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    body["metadata"]["namespace"] = "llm"
    service = ModelService.parse(body)
    if name == "gpu":
        engine = service.spec.engine
        assert engine.gpu is not None and engine.tolerations and engine.cache.persistent
        kept = engine.settings.tuned_config_folder
        assert kept is not None and kept.startswith("/var/cache/headrace/")


def test_the_readme_shows_the_example_that_it_applies() -> None:
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)
    assert (EXAMPLES / "demo.yaml").read_text() in blocks
