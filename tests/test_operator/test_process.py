"""The operator as a process: it finds the cluster, leads, works, and hands its Lease back."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import yaml

from headrace_operator.cluster.lease import holder_of
from headrace_testing.kubernetes import NAMESPACE, User
from headrace_testing.model_services import body
from headrace_testing.waiting import eventually


def kubeconfig(folder: Path, url: str) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


async def test_the_operator_leads_works_and_stops_in_order(user: User, tmp_path: Path) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if "KUBERNETES" not in name},
        "KUBECONFIG": str(kubeconfig(tmp_path, user.url)),
        "HEADRACE_OPERATOR_NAMESPACE": NAMESPACE,
        "HEADRACE_OPERATOR_ENGINE_IMAGE": "engine:1",
        "HEADRACE_OPERATOR_IDENTITY": "first",
        "HEADRACE_OPERATOR_LOG_FORMAT": "json",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headrace_operator", env=environment, stderr=asyncio.subprocess.PIPE
    )

    async def deployed() -> bool:
        assert process.returncode is None, "the operator has ended"
        return user.server.find("deployments", "qwen-engine") is not None

    def holder() -> str:
        found = user.server.find("leases", "headrace-operator")
        return "" if found is None else holder_of(found)

    try:
        await user.create(body())
        await eventually(deployed)
        assert holder() == "first"
        process.send_signal(signal.SIGTERM)
        _, output = await asyncio.wait_for(process.communicate(), 30)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()
    assert holder() == "", "the next one need not wait"
    assert "Traceback" not in output.decode()
