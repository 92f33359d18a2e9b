"""A release by tag: the workflow calls `.ci/release`, whose dry run names every step."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
REGISTRY = "registry.example.com/team"
BASE = f"python:3.11-slim-bookworm@sha256:{'0' * 64}"
VERSION = yaml.safe_load((ROOT / "charts" / "headrace" / "Chart.yaml").read_text())["version"]


def dry_run(tag: str, registry: str = REGISTRY) -> subprocess.CompletedProcess[str]:
    given = {"REGISTRY": registry, "PYTHON_IMAGE": BASE, "PATH": os.environ["PATH"]}
    return subprocess.run(
        [str(ROOT / ".ci" / "release"), "--dry-run", tag],
        env=given, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_release_is_tested_before_it_is_built_and_scanned_before_it_is_signed() -> None:
    done = dry_run(f"v{VERSION}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["make check test", "make sbom audit"]
    assert "--platform linux/amd64,linux/arm64" in lines[2] and "--push" in lines[2]
    for target in ("gateway", "operator", "engine"):
        image = f"{REGISTRY}/headrace-{target}"
        scan, sign, attest = (line for line in lines if f"{image}" in line)
        assert scan.startswith("trivy image --exit-code 1") and scan.endswith(f"{image}:{VERSION}")
        assert sign == f"cosign sign --yes {image}@sha256:DIGEST"
        assert f"dist/sbom/headrace-{target}.cdx.json" in attest
    assert lines[-2] == f"make chart-push REGISTRY={REGISTRY}"
    assert lines[-1] == f"cosign sign --yes {REGISTRY}/headrace@sha256:DIGEST"


def test_make_builds_for_the_registry_what_the_release_scans_and_signs() -> None:
    given = ("IMAGE_BUILD=echo", f"PYTHON_IMAGE={BASE}", f"TAG={VERSION}", f"REGISTRY={REGISTRY}")
    command = ["make", "--no-print-directory", "release-images", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    tags = re.findall(r"--tag (\S+)", done.stdout)
    names = ("gateway", "operator", "engine")
    assert tags == [f"{REGISTRY}/headrace-{name}:{VERSION}" for name in names]


@pytest.mark.parametrize(
    ("tag", "registry", "message"),
    [
        ("v9.9.9", REGISTRY, 'the tag is v9.9.9, and pyproject.toml has no line version = "9.9.9"'),
        (f"v{VERSION}", "", "REGISTRY is empty"),
        ("", REGISTRY, "name the tag"),
    ],
)
def test_an_invalid_release_version_is_refused(tag: str, registry: str, message: str) -> None:
    done = dry_run(tag, registry)
    assert done.returncode != 0
    assert message in done.stderr
    assert done.stdout == ""


def test_the_workflow_runs_the_release_of_the_pushed_tag() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}, "YAML 1.1 reads `on` as true"
    assert workflow["permissions"] == {
        "contents": "read",
        "packages": "write",
        "id-token": "write",
    }
    steps = workflow["jobs"]["release"]["steps"]
    assert steps[-1]["run"] == '.ci/release "$GITHUB_REF_NAME"'
    assert all(re.search(r"@v\d", step["uses"]) for step in steps if "uses" in step)
