"""The history of scaling outlives the operator."""

from dataclasses import replace

from kubernetes.aio.client import Configuration

from headrace_operator.cluster.cluster import Cluster
from headrace_operator.reconciliation.scaling_history import ScalingHistories
from headrace_operator.scaling.history import History
from headrace_testing.kubernetes import NAMESPACE, User
from headrace_testing.model_services import service


async def test_a_history_is_read_again_after_a_restart(user: User) -> None:
    cluster = Cluster(Configuration(host=user.url))
    try:
        history = History(cold_start=42.0, changes=((1.0, 2),))
        await ScalingHistories(cluster).save(service(), history, 100.0)
        assert await ScalingHistories(cluster).load(service()) == history
    finally:
        await cluster.close()


async def test_a_history_is_written_on_changes_and_once_a_minute(user: User) -> None:
    cluster = Cluster(Configuration(host=user.url))
    histories = ScalingHistories(cluster)

    def saved() -> int:
        return sum(plural == "configmaps" for _, plural, _ in user.server.written)

    try:
        history = History(cold_start=1.0)
        for now, expected in ((100.0, 1), (130.0, 1), (161.0, 2)):
            history = replace(history, cold_start=now)
            await histories.save(service(), history, now)
            assert saved() == expected
        await histories.save(service(), replace(history, changes=((162.0, 1),)), 162.0)
        assert saved() == 3
    finally:
        await cluster.close()


async def test_an_unreadable_history_is_replaced(user: User) -> None:
    await user.create(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "qwen-scaling", "namespace": NAMESPACE},
            "data": {"history.json": "[]"},
        }
    )
    cluster = Cluster(Configuration(host=user.url))
    try:
        assert await ScalingHistories(cluster).load(service()) == History()
    finally:
        await cluster.close()
