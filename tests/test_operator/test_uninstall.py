"""An uninstall first deletes the ModelServices of the release, and with them their engines."""

import asyncio

from kubernetes.aio.client import Configuration

from headrace_operator import names
from headrace_operator.cluster.cluster import Cluster
from headrace_operator.uninstall import remove_all
from headrace_testing.kubernetes import NAMESPACE, User, pod
from headrace_testing.model_services import body
from headrace_testing.waiting import eventually


async def test_it_ends_when_no_modelservice_and_no_engine_is_left(user: User) -> None:
    for name in ("qwen", "other"):
        await user.create(body(name))
    await user.create(pod("last-stream", "qwen"))
    cluster = Cluster(Configuration(host=user.url))
    removing = asyncio.create_task(remove_all(cluster, NAMESPACE))

    async def deleted() -> bool:
        return user.server.all(names.PLURAL) == []

    await eventually(deleted, seconds=30)
    assert not removing.done()
    await user.delete("v1", "pods", "last-stream")
    await asyncio.wait_for(removing, 60)
    await cluster.close()
