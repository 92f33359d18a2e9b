"""The operator's RBAC rules: they allow everything that it calls, and nothing that it could
misuse."""

import ast
from itertools import product

import pytest

from headrace_operator import names
from headrace_testing.charts import CHART, ROOT, Manifest, named, of_kind, render

OPERATOR = ROOT / "operator" / "headrace_operator"
# The verbs of the calls that cluster.py makes for objects that the operator owns: read, apply,
# delete.
OWNED = ("get", "create", "patch", "delete")
Rule = tuple[str, str, str]


def rules(objects: list[Manifest], kind: str, name: str) -> set[Rule]:
    """(group, resource, verb) of every rule."""
    found: set[Rule] = set()
    for rule in named(objects, kind, name)["rules"]:
        found |= set(product(rule["apiGroups"], rule["resources"], rule["verbs"]))
    return found


@pytest.fixture(scope="module")
def granted() -> set[Rule]:
    return rules(render(), "Role", "headrace-operator")


def manifests_made() -> set[tuple[str, str]]:
    """The (group, plural) of every kind whose apiVersion occurs in desired/."""
    found = set()
    for path in sorted((OPERATOR / "desired").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Dict):
                found |= _kind_of(node)
    return found


def _kind_of(node: ast.Dict) -> set[tuple[str, str]]:
    pairs = {
        key.value: value.value
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(value, ast.Constant)
    }
    version, kind = pairs.get("apiVersion"), pairs.get("kind")
    if not isinstance(version, str) or not isinstance(kind, str):
        return set()
    group = version.rpartition("/")[0]
    plural = kind.lower().removesuffix("y") + ("ies" if kind.endswith("y") else "s")
    return {(group, plural)}


def test_the_operator_may_manage_every_kind_that_it_makes(granted: set[Rule]) -> None:
    made = manifests_made()

    assert {("apps", "deployments"), ("apps", "statefulsets")} < made
    missing = {(*kind, verb) for kind in made for verb in OWNED} - granted
    assert missing == set()


def test_the_operator_may_manage_no_other_kind(granted: set[Rule]) -> None:
    deletable = {(group, resource) for group, resource, verb in granted if verb == "delete"}

    assert deletable == manifests_made()


def test_the_operator_may_watch_and_report_on_its_own_kind(granted: set[Rule]) -> None:
    group, plural = names.GROUP, names.PLURAL
    wanted = {(group, plural, verb) for verb in ("get", "list", "watch")}
    wanted |= {(group, f"{plural}/status", "patch"), (group, f"{plural}/finalizers", "update")}

    assert {rule for rule in granted if rule[0] == group} == wanted


@pytest.mark.parametrize(
    ("group", "resource"),
    [
        ("apps", "deployments"),
        ("apps", "statefulsets"),
        ("leaderworkerset.x-k8s.io", "leaderworkersets"),
    ],
)
def test_the_operator_may_watch_the_workloads_that_it_makes(
    granted: set[Rule], group: str, resource: str
) -> None:
    assert {(group, resource, "list"), (group, resource, "watch")} <= granted


def test_the_operator_may_mark_pods_and_write_events(granted: set[Rule]) -> None:
    assert {rule for rule in granted if rule[1] in ("pods", "events")} == {
        ("", "pods", "list"),
        ("", "pods", "patch"),
        ("", "events", "create"),
    }


def test_the_operator_may_store_its_history_in_configmaps(granted: set[Rule]) -> None:
    assert {rule for rule in granted if rule[1] == "configmaps"} == {
        ("", "configmaps", verb) for verb in ("get", "create", "patch")
    }


def test_the_operator_may_not_read_secrets_or_extend_its_rights(granted: set[Rule]) -> None:
    resources = {resource for _, resource, _ in granted}

    assert not {("", "secrets", verb) for verb in ("get", "list", "watch", "patch", "*")} & granted
    assert not {"roles", "rolebindings", "pods/exec", "nodes", "*"} & resources
    assert not {"*", "escalate", "bind", "impersonate"} & {verb for _, _, verb in granted}
    assert not {("", "pods", verb) for verb in ("create", "delete")} & granted


def test_the_operator_may_change_only_its_own_lease() -> None:
    role = named(render(), "Role", "headrace-operator-leader")
    by_verb = {verb: rule for rule in role["rules"] for verb in rule["verbs"]}

    assert set(by_verb) == {"create", "get", "update"}
    assert by_verb["update"]["resourceNames"] == by_verb["get"]["resourceNames"]
    assert by_verb["update"]["resourceNames"] == ["headrace-operator"]


def test_the_definitions_have_the_kind_that_the_rules_name() -> None:
    definition = named(render(), "CustomResourceDefinition", f"{names.PLURAL}.{names.GROUP}")

    assert definition["spec"]["names"]["plural"] == names.PLURAL


@pytest.mark.parametrize(
    ("all_namespaces", "role", "binding"),
    [(False, "Role", "RoleBinding"), (True, "ClusterRole", "ClusterRoleBinding")],
)
def test_rules_are_bound_where_modelservices_are_watched(
    all_namespaces: bool, role: str, binding: str
) -> None:
    objects = render({"operator": {"watchAllNamespaces": all_namespaces}})
    subject = {"kind": "ServiceAccount", "name": "headrace-operator", "namespace": "llm"}
    bound = of_kind(objects, binding)

    assert all(each["subjects"] == [subject] for each in bound)
    for each in bound:
        named(objects, each["roleRef"]["kind"], each["roleRef"]["name"])
    assert any(each["roleRef"]["kind"] == role for each in bound)
    assert bool(of_kind(objects, "ClusterRole")) is all_namespaces


def test_without_the_operator_there_are_no_rules() -> None:
    objects = render({"operator": {"enabled": False}})

    for kind in ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"):
        assert of_kind(objects, kind) == []


def test_two_releases_have_separate_cluster_roles() -> None:
    (role,) = of_kind(render({"operator": {"watchAllNamespaces": True}}), "ClusterRole")

    assert role["metadata"]["name"] == "llm-headrace-operator"


def test_definitions_are_upgraded_with_the_release_and_survive_its_removal() -> None:
    """They are not in Helm's folder crds/, which Helm never upgrades."""
    kept = of_kind(render(), "CustomResourceDefinition")[0]["metadata"]["annotations"]
    loose = of_kind(render({"crds": {"keep": False}}), "CustomResourceDefinition")[0]
    none = of_kind(render({"crds": {"enabled": False}}), "CustomResourceDefinition")

    assert kept["helm.sh/resource-policy"] == "keep"
    assert "helm.sh/resource-policy" not in loose["metadata"].get("annotations", {})
    assert none == []
    assert not (CHART / "crds").exists()


def test_the_operator_may_list_nodes_only_if_it_watches_them(granted: set[Rule]) -> None:
    assert not any(resource == "nodes" for _, resource, _ in granted)
    assert of_kind(render(), "ClusterRole") == []

    objects = render({"operator": {"watchNodes": True}})

    (role,) = of_kind(objects, "ClusterRole")
    (binding,) = of_kind(objects, "ClusterRoleBinding")
    assert rules(objects, "ClusterRole", role["metadata"]["name"]) == {
        ("", "nodes", verb) for verb in ("list", "watch")
    }
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
