"""A ModelService must not mount or read the release's own objects."""

from typing import Any

import pytest

from headrace_operator.errors import InvalidSpec
from headrace_operator.names import redis_secret
from headrace_operator.spec.reserved import Reserved
from headrace_testing.kubernetes import NAMESPACE, User
from headrace_testing.model_services import HUB, body, service
from headrace_testing.operators import Scene, operator
from headrace_testing.waiting import eventually

RESERVED = Reserved(
    NAMESPACE,
    secrets=("headrace-redis", "sh.helm.release.v1.*"),
    claims=("data-headrace-redis-*",),
)
CLAIM = {"claimName": "data-headrace-redis-0"}


def on_claim(name: str) -> dict[str, Any]:
    return {"persistentVolumeClaim": {"claimName": name}}


def variable(secret: str) -> dict[str, Any]:
    return {"name": "URL", "valueFrom": {"secretKeyRef": {"name": secret, "key": "url"}}}


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (
            {"model": {"persistentVolumeClaim": CLAIM}},
            "spec.model.persistentVolumeClaim.claimName",
        ),
        (
            {"lora": {"adapters": [{"name": "a", "persistentVolumeClaim": CLAIM}]}},
            "spec.lora.adapters.0.persistentVolumeClaim.claimName",
        ),
        (
            {"engine": {"env": [variable("mine"), variable("headrace-redis")]}},
            "spec.engine.env.1.valueFrom.secretKeyRef.name",
        ),
        (
            {"engine": {"envFrom": [{"secretRef": {"name": "sh.helm.release.v1.headrace.v3"}}]}},
            "spec.engine.envFrom.0.secretRef.name",
        ),
        (
            {"model": {"hub": {"id": "a/b", "tokenSecret": {"name": "headrace-redis"}}}},
            "spec.model.hub.tokenSecret.name",
        ),
        (
            {"model": {"uri": {"uri": "s3://a/b", "credentialsSecret": "headrace-redis"}}},
            "spec.model.uri.credentialsSecret",
        ),
        (
            {
                "lora": {
                    "adapters": [],
                    "objectStorage": {"credentialsSecret": "headrace-redis"},
                }
            },
            "spec.lora.objectStorage.credentialsSecret",
        ),
        ({"queue": {"urlSecret": {"name": "headrace-redis"}}}, "spec.queue.urlSecret.name"),
        ({"engine": {"imagePullSecrets": ["headrace-redis"]}}, "spec.engine.imagePullSecrets.0"),
    ],
)
def test_objects_of_the_release_are_refused_by_field(spec: dict[str, Any], field: str) -> None:
    requested = service(**spec)
    with pytest.raises(InvalidSpec, match="of the release itself") as caught:
        RESERVED.check(requested)
    assert caught.value.field == field
    Reserved("elsewhere", RESERVED.secrets, RESERVED.claims).check(requested)


@pytest.mark.parametrize(
    "spec",
    [
        {"model": {"persistentVolumeClaim": {"claimName": "data-qwen-0"}}},
        {"engine": {"env": [variable("hf-token"), {"name": "A", "value": "b"}]}},
        {"engine": {"envFrom": [{"configMapRef": {"name": "headrace-redis"}}]}},
        {"queue": {"urlSecret": {"name": "other-redis"}}},
    ],
)
def test_objects_of_the_user_pass(spec: dict[str, Any]) -> None:
    RESERVED.check(service(**spec))


@pytest.mark.parametrize("namespace", [NAMESPACE, "elsewhere"])
def test_the_redis_user_of_another_models_engines_is_refused(namespace: str) -> None:
    other = redis_secret("other")
    for spec in ({"queue": {"urlSecret": {"name": other}}}, {"engine": {"env": [variable(other)]}}):
        with pytest.raises(InvalidSpec, match="other-engine-redis has the name of a Secret with"):
            Reserved(namespace).check(service(**spec))


async def test_no_engine_runs_with_the_releases_volume(user: User, scene: Scene) -> None:
    scene.reserved = RESERVED
    async with operator(user, scene):
        await user.create(body("thief", model={"persistentVolumeClaim": CLAIM}))
        await user.create(body("honest", model=HUB))

        async def conditions_written() -> bool:
            seen = user.server.conditions
            return seen("thief").get("Degraded", ("", ""))[1] == "InvalidSpec" and bool(
                seen("honest")
            )

        await eventually(conditions_written, seconds=10)
    assert user.server.find("deployments", "thief-engine") is None
    assert user.server.find("deployments", "honest-engine") is not None


def own_claim(name: str) -> dict[str, Any]:
    meta = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta, "spec": {}}


async def until_there(user: User, plural: str, name: str) -> None:
    async def there() -> bool:
        return user.server.find(plural, name) is not None

    await eventually(there, seconds=10)


async def test_no_engine_runs_with_the_cache_of_another_model_service(
    user: User, scene: Scene
) -> None:
    server = user.server
    adapters = [{"name": "a", "persistentVolumeClaim": {"claimName": "other-cache"}}]
    async with operator(user, scene):
        await user.create(body("other", model=HUB, engine={"cache": {"persistent": True}}))
        await until_there(user, "persistentvolumeclaims", "other-cache")
        await user.create(body("thief", model=on_claim("other-cache")))
        await user.create(body("adapters", model=HUB, lora={"adapters": adapters}))
        await user.create(body("early", model=on_claim("later-cache")))
        refused = {"thief", "adapters", "early"}

        async def conditions_written() -> bool:
            degraded = [server.conditions(name).get("Degraded", ("", ""))[1] for name in refused]
            return degraded == ["InvalidSpec"] * 3

        await eventually(conditions_written, seconds=10)
        assert not [name for name in refused if server.find("deployments", f"{name}-engine")]


async def test_a_users_own_claim_may_have_a_caches_name(user: User, scene: Scene) -> None:
    async with operator(user, scene):
        await user.create(own_claim("weights-cache"))
        await user.create(body("honest", model=on_claim("weights-cache")))
        own = body("qwen", model=on_claim("qwen-cache"), engine={"cache": {"persistent": True}})
        await user.create(own)
        for name in ("honest-engine", "qwen-engine"):
            await until_there(user, "deployments", name)
