"""The chart's Redis with Sentinels as processes, which run the commands of the rendered pods.

Each pod has an address of the loopback network instead of a name.
"""

import os
import re
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import redis

from .charts import Manifest, named, plain_secrets, render, workload
from .needs import missing
from .processes import until
from .redis_cli import __file__ as redis_cli
from .valkey import require_server

PODS = 3
PATIENCE_S = 240.0
# Milliseconds. By default Sentinels tell each other of themselves every 2 s, ask servers for their
# replicas every 10 s, and call a server down after 5 s.
_ASK_MS, _DOWN_MS = 250, 2500
_PERIODS = [part for name in ("info", "publish", "ask") for part in (f"{name}-period", _ASK_MS)]
Secrets = dict[str, dict[str, str]]


def sentinel_values(**bundled: object) -> Manifest:
    """Values with Sentinels; `bundled` has more fields of `redis.bundled`."""
    return {"redis": {"bundled": {"sentinel": {"enabled": True}, **bundled}}}


def require_busybox() -> str:
    """Returns busybox, the shell and tools of Alpine's images.

    Skips the test without it, or fails it in CI.
    """
    if found := shutil.which("busybox"):
        return found
    missing("busybox: make system-packages")


class BundledPods:
    """Three pods, which `start` starts.

    `given` are Secrets beside those of the chart. With `busybox` the pods have only its tools.
    """

    def __init__(
        self,
        folder: Path,
        values: Manifest | None = None,
        given: Secrets | None = None,
        busybox: str | None = None,
    ) -> None:
        self.objects = render(values or sentinel_values())
        self.secrets = plain_secrets(self.objects) | (given or {})
        self.busybox = busybox
        net = f"127.{1 + secrets.randbelow(250)}.{secrets.randbelow(250)}"
        self.addresses = [f"{net}.{10 + number}" for number in range(PODS)]
        self.pods = [BundledPod(self, number, folder / str(number)) for number in range(PODS)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def local(self, text: str) -> str:
        """A text of the chart, with addresses instead of names."""
        for number, address in enumerate(self.addresses):
            text = text.replace(f"headrace-redis-{number}.llm.svc", address)
        return text

    @property
    def url(self) -> str:
        """The URL that gateways use."""
        gateway = workload(self.objects, "headrace-gateway").environment
        return self.local(self.value(gateway["HEADRACE_GATEWAY_REDIS_URL"]))

    @property
    def password(self) -> str:
        return self.value(workload(self.objects, "headrace-redis").environment["REDIS_PASSWORD"])

    def value(self, variable: Manifest) -> str:
        """Returns the value that a Secret gives a variable."""
        reference = variable["valueFrom"]["secretKeyRef"]
        return self.secrets[reference["name"]][reference["key"]]

    def start(self) -> None:
        for pod in self.pods:
            pod.start()

    def begin(self) -> None:
        """Starts a new set, whose first pod becomes the master."""
        self.start()
        self.until_ready()
        self.until_master(self.pods[0])

    def until_ready(self) -> None:
        """Waits until every pod runs and has the data, and the Sentinels know each other."""
        until(lambda: all(map(BundledPod.hurry, self.pods)), "all Sentinels to run", PATIENCE_S)
        # The probe is expensive, so it first runs when it can succeed.
        until(lambda: all(map(BundledPod.linked, self.pods)), "servers to be linked", PATIENCE_S)
        until(lambda: all(map(BundledPod.ready, self.pods)), "all pods to be ready", PATIENCE_S)
        until(lambda: all(map(BundledPod.knows_all, self.pods)), "Sentinels to meet", PATIENCE_S)

    def kill(self) -> None:
        for pod in self.pods:
            pod.kill()

    @property
    def master(self) -> "BundledPod":
        """The pod whose server says that it is master.

        Raises ValueError unless there is exactly one.
        """
        (found,) = (pod for pod in self.pods if pod.role() == "master")
        return found

    def until_master(self, *pods: "BundledPod") -> None:
        """Waits until one of these pods is master, all running Sentinels say so, and it accepts
        writes."""
        wanted = {pod.address for pod in pods}

        def agreed() -> bool:
            masters = {pod.sees() for pod in self.pods if pod.running}
            return len(masters) == 1 and masters <= wanted and self.by_address(*masters).writes()

        until(agreed, f"one of {sorted(wanted)} to be master", PATIENCE_S)

    def by_address(self, address: str) -> "BundledPod":
        return self.pods[self.addresses.index(address)]


class BundledPod:
    """A server and a Sentinel. Its folder stands for its volume."""

    def __init__(self, pods: BundledPods, number: int, folder: Path) -> None:
        self._pods = pods
        self.address = pods.addresses[number]
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._containers = {
            each["name"]: each for each in workload(pods.objects, "headrace-redis").containers
        }

    @property
    def running(self) -> bool:
        return bool(self._processes)

    def start(self) -> None:
        for name in ("data", "etc", "run", "bin"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for path, text in named(self._pods.objects, "ConfigMap", "headrace-redis")["data"].items():
            (self.folder / "etc" / path).write_text(self._moved(text))
        program = self.folder / "bin" / "valkey-server"
        if not program.exists():
            program.symlink_to(require_server())
            cli = self.folder / "bin" / "valkey-cli"
            cli.write_text(f'#!/bin/sh\nexec {sys.executable} -S {redis_cli} "$@"\n')
            cli.chmod(0o755)
            if self._pods.busybox is not None:
                install = (self._pods.busybox, "--install", "-s", self.folder / "bin")
                subprocess.run(install, check=True)
        for name in ("redis", "sentinel"):
            with (self.folder / f"{name}.log").open("ab") as log:
                command = [self._moved(word) for word in self._containers[name]["command"]]
                self._processes.append(
                    subprocess.Popen(command, env=self._environment(name), stdout=log, stderr=log)
                )

    def _moved(self, text: str) -> str:
        """Replaces the container's paths by paths below the folder, and its addresses by the pod's
        address."""
        text = text.replace("dir /tmp", f"dir {self.folder}")
        for path, name in (("/etc/redis", "etc"), ("/run/redis", "run"), ("/data", "data")):
            text = re.sub(rf"(?<!\w){path}\b", str(self.folder / name), text)
        text = text.replace("bind * -::*", f"bind {self.address}")
        return text.replace("127.0.0.1", self.address)

    def _environment(self, container: str) -> dict[str, str]:
        values = {
            each["name"]: self._pods.value(each)
            for each in self._containers[container]["env"]
            if "secretKeyRef" in each.get("valueFrom", ())
        }
        tools = "" if self._pods.busybox is not None else f":{os.environ['PATH']}"
        return {
            "PATH": f"{self.folder / 'bin'}{tools}",
            "SELF": self.address,
            "SERVERS": " ".join(self._pods.addresses),
            **values,
        }

    def _hook(self, *place: str) -> bool:
        """Runs the command of a probe or hook of the server's container."""
        found: Any = self._containers["redis"]
        for key in place:
            found = found[key]
        command = [self._moved(word) for word in found["exec"]["command"]]
        environment = self._environment("redis")
        return subprocess.run(command, env=environment, check=False).returncode == 0

    def ready(self) -> bool:
        return self._hook("readinessProbe")

    def leave(self) -> None:
        """Ends as a deleted pod does: the hook runs, then SIGTERM comes."""
        self._hook("lifecycle", "preStop")
        for process in self._processes:
            process.terminate()
        self._gone()

    def kill(self) -> None:
        """Ends as a pod does whose node fails."""
        for process in self._processes:
            process.kill()
        self._gone()

    def lose_volume(self) -> None:
        shutil.rmtree(self.folder / "data")

    def _gone(self) -> None:
        for process in self._processes:
            process.wait()
        self._processes = []

    def connect(self, port: int = 6379, user: str = "default") -> redis.Redis:
        return redis.Redis(
            host=self.address,
            port=port,
            username=user,
            password=self._pods.password,
            protocol=2,
            decode_responses=True,
        )

    def role(self) -> str:
        try:
            with self.connect() as client:
                return str(client.execute_command("ROLE")[0])
        except redis.RedisError:
            return ""

    def linked(self) -> bool:
        """Whether the server is a master, or a replica that is connected to its master."""
        try:
            with self.connect() as client:
                role = client.execute_command("ROLE")
        except redis.RedisError:
            return False
        return bool(role[0] == "master" or role[3] == "connected")

    def hurry(self) -> bool:
        """Makes its Sentinel learn and decide sooner; returns whether it runs."""
        down = ("headrace", "down-after-milliseconds", _DOWN_MS)
        try:
            with self.connect(26379, "headrace-sentinel") as client:
                client.execute_command("SENTINEL", "SET", *down)
                client.execute_command("SENTINEL", "DEBUG", *_PERIODS)
        except redis.ResponseError:  # an older server, whose Sentinels only take longer
            return True
        except redis.RedisError:
            return False
        return True

    def writes(self) -> bool:
        """Whether the server accepts writes."""
        try:
            with self.connect() as client:
                return bool(client.set("written", 1))
        except redis.RedisError:
            return False

    def keys(self) -> set[str]:
        with self.connect() as client:
            return set(client.keys("*"))

    def sees(self) -> str:
        """The master that its Sentinel names to a client without a password."""
        try:
            with redis.Redis(host=self.address, port=26379, protocol=2, decode_responses=True) as c:
                found = c.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", "headrace")
        except redis.RedisError:
            return ""
        return str(found[0]) if found else ""

    def knows_all(self) -> bool:
        """Whether its Sentinel knows the other Sentinels and all servers."""
        try:
            with self.connect(26379, "headrace-sentinel") as client:
                client.response_callbacks.clear()
                peers = client.execute_command("SENTINEL", "SENTINELS", "headrace")
                replicas = client.execute_command("SENTINEL", "REPLICAS", "headrace")
        except redis.RedisError:
            return False
        return len(peers) == len(replicas) == PODS - 1
