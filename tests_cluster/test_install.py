"""helm install, helm test, the permissions of the processes, and helm uninstall."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from headrace_cluster.kubectl import CommandFailed, run
from headrace_cluster.release import CHART, LABEL, VALUES, Release, Service, installation
from headrace_cluster.specs import MODEL, demo_service
from headrace_testing.processes import until

COMPONENTS = ("gateway", "operator", "redis")
# Objects that Kubernetes creates in every namespace.
ALWAYS_THERE = {"configmap/kube-root-ca.crt", "serviceaccount/default"}
# Kubernetes' garbage collector looks for new types every 30 s, and reads their objects afterwards.
COLLECTED_S = 90


@pytest.fixture(scope="module")
def release() -> Iterator[Release]:
    """A release for this module, which its last test uninstalls."""
    with installation() as release:
        yield release


def test_helm_test_passes_before_there_is_a_model(release: Release) -> None:
    assert "Succeeded" in release.test()


def test_every_component_runs_under_restricted_pod_security(release: Release) -> None:
    for component in COMPONENTS:
        assert release.pods(component), component

    # The API server warns of pods that a level would refuse.
    level = "pod-security.kubernetes.io/enforce=restricted"
    output = run("kubectl", "label", "--overwrite", "--dry-run=server", "namespace",
               release.namespace, level)  # fmt: skip
    assert "violate" not in output


@pytest.mark.parametrize(
    ("allowed", "verb", "resource"),
    [
        (True, "list", "modelservices.headrace.dev"),
        (True, "patch", "modelservices.headrace.dev --subresource=status"),
        (True, "patch", "deployments.apps"),
        (True, "create", "events"),
        (False, "delete", "modelservices.headrace.dev"),
        (False, "list", "secrets"),
        (False, "create", "pods"),
        (False, "create", "pods/exec"),
        (False, "create", "rolebindings.rbac.authorization.k8s.io"),
        (False, "list", "nodes"),
    ],
)
def test_the_operator_has_only_the_rights_that_it_needs(
    release: Release, allowed: bool, verb: str, resource: str
) -> None:
    assert may(release, "headrace-operator", verb, *resource.split()) is allowed


def test_the_operator_has_no_rights_in_other_namespaces(release: Release) -> None:
    asked = ("list", "deployments.apps", "--namespace", "default")

    assert not may(release, "headrace-operator", *asked)


def test_gateways_have_no_rights(release: Release) -> None:
    for resource in ("secrets", "pods", "configmaps", "modelservices.headrace.dev"):
        assert not may(release, "headrace-gateway", "get", resource), resource


def test_the_policy_for_model_services_narrows_what_they_may_use(release: Release) -> None:
    policy = {"enabled": True, "images": ["registry.example.com/*"], "env": ["HF_*"]}
    release.upgrade("--set-json", f"modelServicePolicy={json.dumps(policy)}")
    engine = demo_service()["spec"]["engine"]
    others: dict[str, object] = {
        "image": "docker.io/library/busybox:1",
        "env": [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "redis", "key": "url"}}}],
        "envFrom": [{"secretRef": {"name": "redis"}}],
        "extraArgs": ["--model=/other"],
    }

    def refused(**fields: object) -> str:
        """The errors of a dry run; none if it passes."""
        manifest = demo_service("narrow", engine={**engine, **fields})
        try:
            release.kubectl.apply(manifest, "--dry-run=server")
        except CommandFailed as refusal:
            return str(refusal)
        return ""

    until(lambda: refused(image=others["image"]) != "", "the policy to hold")
    for field, value in others.items():
        assert "modelServicePolicy" in refused(**{field: value}), field
    assert refused() == ""
    assert refused(image="registry.example.com/e:1", env=[{"name": "HF_HOME", "value": "/"}]) == ""
    policies = ("get", "validatingadmissionpolicies", "--selector", LABEL, "-o", "json")
    (found,) = json.loads(release.kubectl(*policies))["items"]
    assert "expressionWarnings" not in found["status"].get("typeChecking", {})
    release.upgrade()
    until(lambda: refused(image=others["image"]) == "", "the policy to go")


def test_a_second_release_must_not_install_the_definitions(release: Release) -> None:
    second = ("helm", "install", "second", str(CHART), "--values", str(VALUES), "--dry-run=server")
    with pytest.raises(CommandFailed) as refused:
        run(*second, "--namespace", "default")

    output = str(refused.value)
    assert f"belongs to the release headrace in namespace {release.namespace}" in output
    assert "set crds.enabled=false for this release" in output
    assert "kind: Deployment" in run(
        *second, "--namespace", "default", "--set", "crds.enabled=false"
    )


def test_uninstall_leaves_nothing_behind(release: Release) -> None:
    """Custom resource definitions go too, because ci/small-values.yaml says so."""
    service = Service(release, MODEL)
    release.kubectl.apply(demo_service())
    service.until_ready(1)
    assert "demo answered with" in release.test()
    release.upgrade("--set", "operator.deleteModelServices=true")
    until(lambda: age_of_definition() > COLLECTED_S, "the garbage collector to know the type")

    release.uninstall()

    until(lambda: left_in_namespace(release) == set(), "the namespace to be empty", 180)
    # A volume is deleted some time after its claim.
    until(lambda: left_in_cluster() == [], "nothing of it to be left in the cluster", 180)


def age_of_definition() -> float:
    """In seconds. If the garbage collector has never seen an object's type, what the object owns
    stays for ever when the type is deleted."""
    name = "modelservices.headrace.dev"
    created = run("kubectl", "get", "crd", name, "-o", "jsonpath={.metadata.creationTimestamp}")
    return (datetime.now(UTC) - datetime.fromisoformat(created.strip())).total_seconds()


def may(release: Release, account: str, *asked: str) -> bool:
    user = f"system:serviceaccount:{release.namespace}:{account}"
    try:
        return release.kubectl("auth", "can-i", *asked, "--as", user).strip() == "yes"
    except CommandFailed as refused:
        assert "no" in str(refused)
        return False


def left_in_namespace(release: Release) -> set[str]:
    kinds = run("kubectl", "api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
    wanted = ",".join(sorted(kind for kind in kinds if not kind.startswith("events")))
    found = json.loads(release.kubectl("get", wanted, "-o", "json"))["items"]
    names = {f"{item['kind'].lower()}/{item['metadata']['name']}" for item in found}
    return names - ALWAYS_THERE


def left_in_cluster() -> list[str]:
    kinds = (
        "clusterroles,clusterrolebindings,customresourcedefinitions,persistentvolumes,"
        "validatingadmissionpolicies,validatingadmissionpolicybindings"
    )
    found = json.loads(run("kubectl", "get", kinds, "-o", "json"))["items"]
    return [item["metadata"]["name"] for item in found if "headrace" in json.dumps(item)]
