"""A Prometheus that reads the metrics of a release's pods, as one in the cluster would."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from headrace_testing.prometheus import PrometheusServer, Target

from .kubectl import Kubectl
from .release import Release

METRICS_PORT = 9400


@contextmanager
def scraped(release: Release, folder: Path) -> Iterator[PrometheusServer]:
    """Scrapes the gateways and the operator that run when the block begins, every second."""
    with ExitStack() as running:
        targets = []
        for pod in [*release.pods("gateway"), *release.pods("operator")]:
            port = running.enter_context(forwarded(release.kubectl, pod, METRICS_PORT))
            targets.append(Target(port, {"namespace": release.namespace, "pod": pod}))
        prometheus = PrometheusServer(folder, targets)
        running.callback(prometheus.close)
        prometheus.await_ready()
        prometheus.await_targets()
        yield prometheus


@contextmanager
def forwarded(kubectl: Kubectl, pod: str, port: int) -> Iterator[int]:
    """A port of this machine that leads to a pod's port while the block runs."""
    command = ["kubectl", "--namespace", kubectl.namespace, "port-forward", pod, f":{port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as forwarding:
        try:
            assert forwarding.stdout is not None
            told = forwarding.stdout.readline()  # Forwarding from 127.0.0.1:40123 -> 9400
            assert "->" in told, f"kubectl port-forward ended with {forwarding.wait()}"
            yield int(told.split(" -> ")[0].rpartition(":")[2])
        finally:
            forwarding.kill()
