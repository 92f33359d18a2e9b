"""kubectl as a user of the cluster runs it, and the API server for reading. The cluster is the one
that KUBECONFIG names."""

import json
import subprocess
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from .api import api, path

Manifest = dict[str, Any]
COMMAND_TIMEOUT_S = 240


class CommandFailed(Exception):
    """A command ended with a status other than 0, or the API refused a request."""


def run(*command: str, stdin: str | None = None, both: bool = False) -> str:
    """Returns standard output, with `both` the error output too. Raises CommandFailed."""
    done = subprocess.run(
        command,
        input=stdin,
        stdin=None if stdin is not None else subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise CommandFailed(f"{' '.join(command)}: {done.stderr.strip()}{done.stdout.strip()}")
    return done.stderr + done.stdout if both else done.stdout


class Kubectl:
    """Runs kubectl in one namespace."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def __call__(self, *arguments: str, stdin: str | None = None) -> str:
        return run("kubectl", "--namespace", self.namespace, *arguments, stdin=stdin)

    def apply(self, manifest: Mapping[str, Any], *flags: str) -> str:
        return self("apply", *flags, "-f", "-", stdin=json.dumps(manifest))

    def get(self, resource: str, name: str) -> Manifest:
        """An object. `resource` is the kind as in the API's paths: pods."""
        return self._read(path(self.namespace, resource, name))

    def items(self, resource: str, selector: str = "") -> list[Manifest]:
        found = self._read(path(self.namespace, resource), labelSelector=selector)
        objects: list[Manifest] = found["items"]
        return objects

    def names(self, resource: str, selector: str = "") -> list[str]:
        return sorted(item["metadata"]["name"] for item in self.items(resource, selector))

    def _read(self, at: str, **parameters: str) -> Manifest:
        answer = api().get(at, params=parameters)
        if not answer.is_success:
            raise CommandFailed(f"GET {at}: {answer.text}")
        found: Manifest = answer.json()
        return found

    def patch(self, kind: str, name: str, patch: Mapping[str, Any]) -> None:
        self("patch", kind, name, "--type", "merge", "--patch", json.dumps(patch))

    def kill(self, pod: str) -> None:
        """Ends a pod without notice, as a node that dies does."""
        self("delete", "pod", pod, "--grace-period=0", "--force", "--wait=false")

    def events(self, name: str) -> list[Manifest]:
        """The events of one object, the oldest first."""
        return sorted(
            (event for event in self.items("events") if event["involvedObject"]["name"] == name),
            key=lambda event: str(event["firstTimestamp"]),
        )


class PodLog:
    """The log of a pod from the start of the block until the pod's end."""

    def __init__(self, kubectl: Kubectl, pod: str) -> None:
        self._lines: list[str] = []
        self._file = tempfile.TemporaryFile("w+")
        command = ["kubectl", "--namespace", kubectl.namespace, "logs", "--follow", pod]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._file, stderr=subprocess.DEVNULL
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        self._process.wait()
        with self._file:
            self._file.seek(0)
            self._lines = self._file.readlines()

    def entries(self, message: str) -> list[Manifest]:
        """JSON lines with this message, after the block has ended."""
        lines = [json.loads(line) for line in self._lines if line.startswith("{")]
        return [line for line in lines if line.get("message") == message]
