"""Every rendered object: it is known to Kubernetes, well named, labelled, and equal to the
snapshot."""

import difflib
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from kubernetes import client

from headrace_testing.charts import (
    NAMESPACE,
    SCENARIOS,
    SNAPSHOT,
    Manifest,
    of_kind,
    render,
    render_files,
    scenario,
    selects,
    snapshot,
    workloads,
)

OF_STATEFUL_SETS = ("apps.kubernetes.io/pod-index", "statefulset.kubernetes.io/pod-name")
MANY = (
    *("templates/crds/", "templates/monitoring/", "templates/NOTES"),
    "templates/redis/pod-services",
)
Check = Callable[[Manifest], Any]
# The API's own models: they refuse unknown fields, wrong types and missing ones.
BUILT_IN: dict[tuple[str, str], Check] = {
    ("v1", "ConfigMap"): client.V1ConfigMap.model_validate,
    ("v1", "Pod"): client.V1Pod.model_validate,
    ("v1", "Secret"): client.V1Secret.model_validate,
    ("v1", "Service"): client.V1Service.model_validate,
    ("v1", "ServiceAccount"): client.V1ServiceAccount.model_validate,
    (
        "admissionregistration.k8s.io/v1",
        "ValidatingAdmissionPolicy",
    ): client.V1ValidatingAdmissionPolicy.model_validate,
    (
        "admissionregistration.k8s.io/v1",
        "ValidatingAdmissionPolicyBinding",
    ): client.V1ValidatingAdmissionPolicyBinding.model_validate,
    ("apps/v1", "Deployment"): client.V1Deployment.model_validate,
    ("apps/v1", "StatefulSet"): client.V1StatefulSet.model_validate,
    ("coordination.k8s.io/v1", "Lease"): client.V1Lease.model_validate,
    ("autoscaling/v2", "HorizontalPodAutoscaler"): client.V2HorizontalPodAutoscaler.model_validate,
    ("networking.k8s.io/v1", "Ingress"): client.V1Ingress.model_validate,
    ("networking.k8s.io/v1", "NetworkPolicy"): client.V1NetworkPolicy.model_validate,
    ("policy/v1", "PodDisruptionBudget"): client.V1PodDisruptionBudget.model_validate,
    ("rbac.authorization.k8s.io/v1", "ClusterRole"): client.V1ClusterRole.model_validate,
    (
        "rbac.authorization.k8s.io/v1",
        "ClusterRoleBinding",
    ): client.V1ClusterRoleBinding.model_validate,
    ("rbac.authorization.k8s.io/v1", "Role"): client.V1Role.model_validate,
    ("rbac.authorization.k8s.io/v1", "RoleBinding"): client.V1RoleBinding.model_validate,
}
# Other projects' definitions, with the fields of their specs that the chart may use.
CUSTOM: dict[tuple[str, str], set[str]] = {
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): {"parentRefs", "hostnames", "rules"},
    ("monitoring.coreos.com/v1", "PodMonitor"): {
        "selector",
        "namespaceSelector",
        "podMetricsEndpoints",
    },
    ("monitoring.coreos.com/v1", "PrometheusRule"): {"groups"},
    ("monitoring.coreos.com/v1", "ServiceMonitor"): {"selector", "endpoints"},
    ("apiextensions.k8s.io/v1", "CustomResourceDefinition"): {
        "group",
        "scope",
        "names",
        "versions",
    },
}
CLUSTER_SCOPED = {
    "ClusterRole",
    "ClusterRoleBinding",
    "CustomResourceDefinition",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}


def test_the_default_render_is_the_snapshot() -> None:
    """Renew it with `PYTHONPATH=tests/support .venv/bin/python -m headrace_testing.charts`."""
    stored, now = SNAPSHOT.read_text(), snapshot()
    changes = difflib.unified_diff(stored.splitlines(), now.splitlines(), "stored", "now", n=2)

    assert stored == now, "\n".join(changes)


@pytest.mark.parametrize("name", SCENARIOS)
def test_objects_are_valid_for_kubernetes(name: str) -> None:
    for manifest in render(scenario(name)):
        kind = manifest["apiVersion"], manifest["kind"]
        if check := BUILT_IN.get(kind):
            check(manifest)
        else:
            assert set(manifest) == {"apiVersion", "kind", "metadata", "spec"}
            assert set(manifest["spec"]) <= CUSTOM[kind], kind


@pytest.mark.parametrize("name", SCENARIOS)
def test_objects_have_unique_names_in_the_releases_namespace(name: str) -> None:
    objects = render(scenario(name))
    seen = Counter((m["kind"], m["metadata"]["name"]) for m in objects)

    assert [key for key, times in seen.items() if times > 1] == []
    for manifest in objects:
        meta = manifest["metadata"]
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", meta["name"])
        if manifest["kind"] not in CLUSTER_SCOPED:
            assert meta["namespace"] == NAMESPACE, meta["name"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_objects_carry_the_recommended_labels(name: str) -> None:
    for manifest in render(scenario(name)):
        labels = manifest["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "headrace"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert {"helm.sh/chart", "app.kubernetes.io/version"} <= labels.keys()


def test_a_user_s_labels_reach_objects_and_pods_but_no_selector() -> None:
    own = {"team": "inference", "app.kubernetes.io/name": "other"}
    objects = render({"commonLabels": own})

    for manifest in objects:
        labels = manifest["metadata"]["labels"]
        assert labels["team"] == "inference"
        assert labels["app.kubernetes.io/name"] == "headrace"
    for each in workloads(objects):
        assert each.labels["team"] == "inference"
    assert "inference" not in str([_selector(m) for m in objects])


@pytest.mark.parametrize("name", SCENARIOS)
def test_selectors_select_their_pods_and_have_no_version(name: str) -> None:
    objects = render(scenario(name))
    for each in workloads(objects):
        if each.manifest["kind"] != "Pod":
            assert selects(_selector(each.manifest), each.labels)
    for manifest in objects:
        unstable = {"helm.sh/chart", "app.kubernetes.io/version"}
        assert not unstable & _selector(manifest).keys()


def test_an_upgrade_of_only_the_chart_restarts_no_pod() -> None:
    for each in workloads(render(scenario("full-values"))):
        if each.manifest["kind"] != "Pod":
            assert "headrace-0.1.0" not in str(each.pod["metadata"])


@pytest.mark.parametrize("kind", ["Service", "PodDisruptionBudget", "NetworkPolicy"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_selector_finds_pods_of_the_release(name: str, kind: str) -> None:
    objects = render(scenario(name))
    for manifest in of_kind(objects, kind):
        selector = _selector(manifest)
        assert any(selects(selector, each.labels) for each in workloads(objects)), selector


@pytest.mark.parametrize("name", SCENARIOS)
def test_ports_of_services_are_ports_of_containers(name: str) -> None:
    objects = render(scenario(name))
    for service in of_kind(objects, "Service"):
        (target,) = (w for w in workloads(objects) if selects(_selector(service), w.labels))
        ports = {p["name"] for c in target.containers for p in c.get("ports", ())}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_template_file_renders_one_object(name: str) -> None:
    """Exceptions: files from folders, and a Service for each pod."""
    for path, text in render_files(scenario(name)).items():
        if not path.startswith(MANY):
            assert len(re.findall(r"^kind: ", text, re.MULTILINE)) <= 1, path


def _selector(manifest: Manifest) -> dict[str, str]:
    """The selector without the labels that Kubernetes adds to pods."""
    spec = manifest.get("spec", {})
    found = spec.get("selector") or spec.get("podSelector") or {}
    labels: dict[str, str] = found.get("matchLabels", found)
    return {key: value for key, value in labels.items() if key not in OF_STATEFUL_SETS}
