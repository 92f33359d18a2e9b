"""Runs blocks of the README in a shell as they are printed."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from .kubectl import run
from .release import CHART, ROOT

TOOL = Path(os.environ.get("CLUSTER_TOOL", ROOT.parent / "shared" / "cluster"))
# Replacements for Docker and kind on a machine without them: the tool that runs the cluster builds
# images with buildah in the cluster's nodes. The real engine image is built only with FULL=1.
DOCKER = """#!/usr/bin/env bash
set -euo pipefail
state=${CLUSTER_DIR:-$HOME/.cache/cluster}/state
store() { buildah --root "$state/buildah" --runroot "$state/buildah-run" \
  --storage-driver overlay "$@"; }
case $1 in
  build)
    target=$3 tag=$5 context=$6
    if [ "$target" = engine ] && [ -z "${FULL:-}" ]; then
      "$CLUSTER_TOOL/build-image" --from-venv .venv headrace-venv:dev
      exec "$CLUSTER_TOOL/build-image" .ci/engine-image "$tag"
    fi
    exec "$CLUSTER_TOOL/build-image" "$context" "$tag" --target "$target" --layers ;;
  tag) store tag "$2" "$3" ;;
  push) store push --quiet --tls-verify=false "$2" "docker://$2" ;;
  *) echo "docker $1: not known here"; exit 2 ;;
esac
"""
# The images are already in the nodes.
KIND = """#!/usr/bin/env bash
test "$1 $2" = "load docker-image"
"""


def block(word: str) -> str:
    """The only shell block of the README's Kubernetes part that contains `word`."""
    part = (ROOT / "README.md").read_text().split("\n## Kubernetes\n")[1].split("\n## ")[0]
    (found,) = [text for text in re.findall(r"```sh\n(.*?)```", part, re.DOTALL) if word in text]
    return str(found)


def programs(folder: Path) -> Path:
    """Makes a folder for the PATH with `docker` and `kind` if this machine lacks them.

    The nodes then contain the Redis that these would pull.
    """
    if shutil.which("kind") is None or not _docker_answers():
        if not (TOOL / "build-image").exists():
            pytest.skip("there is neither docker nor the tool that runs the cluster")
        for name, script in (("docker", DOCKER), ("kind", KIND)):
            (folder / name).write_text(script)
            (folder / name).chmod(0o755)
        image = yaml.safe_load((CHART / "values.yaml").read_text())["redis"]["bundled"]["image"]
        tag = f"{image['repository']}:{image['tag']}"
        run(str(TOOL / "build-image"), str(TOOL / "images" / "redis"), tag)
    return folder


def _docker_answers() -> bool:
    """Whether Docker's daemon runs: its client may be installed alone."""
    if shutil.which("docker") is None:
        return False
    asked = subprocess.run(["docker", "info"], capture_output=True, timeout=60, check=False)
    return asked.returncode == 0


def type_in(text: str, folder: Path, timeout: float, **environment: str) -> str:
    """Runs the commands in a shell and returns their output; each must succeed."""
    known: Mapping[str, str] = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "CLUSTER_TOOL": str(TOOL),
        **environment,
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=ROOT, env=known, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
