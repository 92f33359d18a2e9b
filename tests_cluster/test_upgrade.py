"""helm upgrade to other images while clients stream."""

import os

from headrace_cluster.load import Load
from headrace_cluster.release import Service
from headrace_cluster.specs import MODEL
from headrace_testing.greedy import GreedyCase
from headrace_testing.processes import until

NEXT_TAG = os.environ.get("NEXT_IMAGE_TAG", "dev-next")


def test_a_release_is_upgraded_without_a_failed_request(
    service: Service, cases: list[GreedyCase]
) -> None:
    release = service.release
    engines = service.engines()
    with Load(release.url, MODEL, cases, clients=6) as load:
        load.await_answers(6)
        release.upgrade("--set", f"image.tag={NEXT_TAG}")
        until(lambda: not set(engines) & set(service.engines()), "the engines to be new", 240)
        service.until_ready(1)
        load.await_answers(6)

    for component in ("gateway", "operator", "engine"):
        images = images_of(service, component)
        assert images == {f"headrace-{component}:{NEXT_TAG}"}


def images_of(service: Service, component: str) -> set[str]:
    pods = service.kubectl.items("pods", f"app.kubernetes.io/component={component}")
    return {
        container["image"]
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
        for container in pod["spec"]["containers"]
    }
