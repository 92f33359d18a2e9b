"""The README's Kubernetes part, run as it is printed, up to the first answer through the
ingress."""

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace_cluster.kubectl import CommandFailed, run
from headrace_cluster.release import ROOT, delete_namespace
from headrace_cluster.typed import block, programs, type_in
from headrace_testing.processes import until

pytestmark = pytest.mark.timeout(1800)  # images are built
NAMESPACE = "headrace"
INGRESS = os.environ.get("INGRESS_URL", "http://127.0.0.1:8080")
BUILD_S, INSTALL_S = 1500.0, 420.0
ANYWHERE = "registry.example.com"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return programs(tmp_path)


@pytest.fixture
def cluster() -> Iterator[None]:
    """Checks that no object of a release exists before the test, nor after it."""
    yield
    if "KEEP" in os.environ:
        return
    definition = ("crd", "modelservices.headrace.dev")
    if run("kubectl", "get", *definition, "--ignore-not-found"):
        run("kubectl", "delete", "modelservices", "--all", "--namespace", NAMESPACE)
    run("helm", "uninstall", "headrace", "--namespace", NAMESPACE, "--ignore-not-found")
    delete_namespace(NAMESPACE)
    run("kubectl", "delete", *definition, "--ignore-not-found", "--timeout=120s")


def answer(printed: str) -> str:
    """The model's text in the last line."""
    body = json.loads(printed[printed.index('{"id"') :])
    return str(body["choices"][0]["message"]["content"])


def test_the_blocks_lead_to_an_answer(
    cluster: None, folder: Path, record_property: Callable[[str, object], None]
) -> None:
    begun = time.monotonic()
    type_in(block("kind load"), folder, BUILD_S)
    built = time.monotonic()
    printed = type_in(block("examples/demo.yaml"), folder, INSTALL_S, INGRESS_URL=INGRESS)

    assert answer(printed).strip()
    ended = time.monotonic()
    record_property("seconds", {"images": built - begun, "to the first answer": ended - built})
    print(f"images {built - begun:.1f} s, install to answer {ended - built:.1f} s")  # noqa: T201


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """The address of an empty OCI registry on loopback."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("docker-registry is not installed (make system-packages)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(tmp_path / "registry")}},
        "http": {"addr": address},
    }
    (tmp_path / "registry.yml").write_text(json.dumps(config))
    process = subprocess.Popen(
        [program, "serve", str(tmp_path / "registry.yml")],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield address
    finally:
        process.terminate()
        process.wait()


@pytest.mark.skipif(not os.environ.get("FULL"), reason="FULL=1: it builds all images again")
def test_images_and_chart_come_from_a_registry(cluster: None, folder: Path, registry: str) -> None:
    """Runs the commands as printed, but with the name of a registry without TLS."""
    text = block("make push").replace(ANYWHERE, registry)
    text = text.replace("helm install", "helm install --plain-http")
    type_in(text, folder, BUILD_S, HELM_FLAGS="--plain-http")
    demo = block("examples/demo.yaml").split("\n", 2)[2]

    assert answer(type_in(demo, folder, INSTALL_S, INGRESS_URL=INGRESS)).strip()
    pods = json.loads(run("kubectl", "get", "pods", "-n", NAMESPACE, "-o", "json"))["items"]
    images = {one["image"] for pod in pods for one in pod["spec"]["containers"]}
    ours = {image for image in images if "headrace-" in image}
    assert len(ours) == 3 and all(image.startswith(f"{registry}/team/") for image in ours)


def test_an_install_without_images_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"image.repository is empty.*make images"):
        run("helm", "install", "headrace", str(ROOT / "charts" / "headrace"), "-n", NAMESPACE)


def test_the_notes_command_names_a_pull_that_failed(cluster: None) -> None:
    values = ("--set", "image.repository=127.0.0.1:1/none", "--create-namespace")
    chart = str(ROOT / "charts" / "headrace")
    printed = run("helm", "install", "headrace", chart, "-n", NAMESPACE, *values)
    (line,) = [line for line in printed.splitlines() if "reason=Failed" in line]

    def told() -> bool:
        return "127.0.0.1:1/none-gateway" in run(*line.split())

    until(told, "the failed pull to be named", 120)
