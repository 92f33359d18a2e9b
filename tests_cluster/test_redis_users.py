"""An engine's own Redis credentials give access to its model only, in a cluster."""

import base64
from collections.abc import Iterator

import pytest
import redis
from openai import OpenAI

from headrace_cluster.release import Release, Service
from headrace_cluster.specs import MODEL
from headrace_common.protocol.redis.users import model_user
from headrace_common.wire.keys import ShardKeys
from headrace_testing.processes import until
from headrace_testing.strangers import all_tries, commands, keys_of

OTHER = "another"
SECRET = f"{MODEL}-engine-redis"
ROTATED_BY = "headrace.dev/redis-password"


def secret(release: Release, name: str) -> dict[str, str]:
    data = release.kubectl.get("secrets", name)["data"]
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


def connect(release: Release, user: str, password: str) -> redis.Redis:
    address = release.kubectl.get("services", f"{release.name}-redis")["spec"]["clusterIP"]
    return redis.Redis(host=address, username=user, password=password, protocol=2)


@pytest.fixture
def admin(release: Release) -> Iterator[redis.Redis]:
    with connect(release, "default", secret(release, f"{release.name}-redis")["password"]) as made:
        yield made


def chat(service: Service) -> str:
    with OpenAI(base_url=f"{service.release.url}/v1", api_key="none", max_retries=5) as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello!"}], max_tokens=8
        )
    return answer.choices[0].message.content or ""


def test_an_engine_s_credentials_open_nothing_of_others(
    service: Service, admin: redis.Redis
) -> None:
    assert chat(service)
    own = secret(service.release, SECRET)
    assert own["username"] == model_user(MODEL)
    found = commands(admin)
    with connect(service.release, own["username"], own["password"]) as engine:
        assert engine.exists(ShardKeys(MODEL).stats) == 1
        pipe = engine.pipeline(transaction=False)
        pipe.response_callbacks.clear()
        tries = all_tries(found, keys_of(OTHER))
        for command in tries:
            pipe.execute_command(*command)
        results = pipe.execute(raise_on_error=False)
    allowed = [
        (command, result)
        for command, result in zip(tries, results, strict=True)
        if not isinstance(result, redis.exceptions.NoPermissionError)
    ]
    assert allowed == []
    assert len(tries) > 10_000


def test_a_password_is_rotated_while_the_engine_serves(
    service: Service, admin: redis.Redis
) -> None:
    before, engines = secret(service.release, SECRET), service.engines()
    service.kubectl("annotate", "modelservice", MODEL, f"{ROTATED_BY}=2", "--overwrite")
    until(lambda: secret(service.release, SECRET) != before, "another password", 120)
    after = secret(service.release, SECRET)
    for word in (before["password"], after["password"]):
        with connect(service.release, after["username"], word) as engine:
            assert engine.ping()
    # The kubelet looks for new Secrets every minute, and at every change of a pod.
    service.kubectl("annotate", "pod", engines[0], f"{ROTATED_BY}=2")
    mounted = ("exec", engines[0], "--", "cat", "/etc/headrace/redis-user/password")
    until(lambda: service.kubectl(*mounted) == after["password"], "the file to follow", 240)
    admin.client_kill_filter(user=after["username"])
    assert chat(service)
    assert service.engines() == engines
    restarts = [
        status["restartCount"]
        for pod in service.kubectl.items("pods", service.selector)
        for status in pod["status"]["containerStatuses"]
    ]
    assert restarts == [0]
