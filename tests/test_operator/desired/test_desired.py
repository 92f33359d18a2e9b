"""The manifests of engines and their companion objects: values in, dictionaries out."""

from dataclasses import replace
from typing import Any

import pytest

from headrace_common.protocol.turns import TurnBounds
from headrace_engine.serving.settings import EngineSettings
from headrace_engine.serving.sharing_config import SharingConfig
from headrace_operator import names
from headrace_operator.desired import companions
from headrace_operator.desired.adapters import folders
from headrace_operator.desired.autoscaler import autoscaler, backlog_query
from headrace_operator.desired.children import canary_of, companions_of, unwanted
from headrace_operator.desired.deployment import deployment
from headrace_operator.desired.environment import PREFIX
from headrace_operator.desired.network import network_policy, port_of
from headrace_testing.model_services import PLATFORM, service

Manifest = dict[str, Any]
PROMETHEUS = "http://prometheus:9090"


def spec_of(found: Manifest) -> Manifest:
    template: Manifest = found["spec"]["template"]["spec"]
    return template


def pod(**spec: Any) -> Manifest:
    return spec_of(deployment(service(**spec), PLATFORM, replicas=1))


def container(**spec: Any) -> Manifest:
    found: Manifest = pod(**spec)["containers"][0]
    return found


def env(**spec: Any) -> dict[str, Any]:
    return {
        variable["name"]: variable.get("value", variable.get("valueFrom"))
        for variable in container(**spec)["env"]
    }


def test_every_engine_variable_is_a_setting_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {
        "dtype": "bfloat16",
        "maxModelLen": 8192,
        "enablePrefixCaching": False,
        "kvCacheDtype": "fp8",
        "kvCacheMemory": "2GiB",
        "memoryUtilization": 0.85,
        "policy": "priority",
        "policyOptions": {"ageing": 30},
        "itlTarget": 0.05,
        "swapSpace": 2,
        "speculativeConfig": {"method": "ngram"},
    }
    values = env(engine={"settings": settings}, queue={"shards": 3})
    variables = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in values.items()
        if name.startswith(PREFIX)
    }
    assert set(variables) <= set(EngineSettings.model_fields)
    for name, value in variables.items():
        monkeypatch.setenv(f"{PREFIX}{name.upper()}", value)
    read = EngineSettings()
    assert (read.model, read.revision, read.name) == ("Qwen/Qwen3-8B", "abc123", "qwen")
    assert (read.dtype, read.kv_cache_dtype, read.max_model_len) == ("bfloat16", "fp8", 8192)
    assert (read.policy, read.policy_options) == ("priority", {"ageing": 30})
    assert (read.itl_target, read.swap_space) == (0.05, 2.0)
    assert read.speculative_config == {"method": "ngram"}
    assert read.enable_prefix_caching is False
    assert (read.kv_cache_memory, read.memory_utilization) == (2 * 2**30, 0.85)
    assert (read.redis_url, read.queue_shards) == ("redis://queue:6379/0", 3)
    assert (read.metrics_host, read.metrics_port) == ("0.0.0.0", names.METRICS_PORT)


def test_sharing_is_settings_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    sharing = {
        "group": "gpu",
        "sleepLevel": 2,
        "minAwakeSeconds": 3,
        "maxAwakeSeconds": 30,
        "timeoutSeconds": 4,
    }
    for name, value in env(sharing=sharing).items():
        if name.startswith(PREFIX):
            monkeypatch.setenv(name, value)
    read = EngineSettings()
    assert read.sharing_group == service(sharing=sharing).sharing_group == "models/gpu"
    assert read.sharing == SharingConfig(2, TurnBounds(3, 30), 4, read.lease)
    assert not {name for name in env() if "SHARING" in name}


def test_adapters_are_settings_and_volumes_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    lora = {
        "maxLoras": 2,
        "maxLoraRank": 32,
        "adapters": [
            {"name": "sql", "path": "/model/adapters/sql"},
            {"name": "org/chat", "persistentVolumeClaim": {"claimName": "lora", "path": "v2"}},
            {"name": "tone", "image": {"reference": "oci://registry/tone:1"}},
        ],
    }
    engine = {"tensorParallelSize": 2, "enableExpertParallel": True}
    values, found = env(lora=lora, engine=engine), pod(lora=lora)
    for name, value in values.items():
        if name.startswith(PREFIX):
            monkeypatch.setenv(name, value)
    read = EngineSettings()
    assert (read.enable_lora, read.max_loras, read.max_lora_rank) == (True, 2, 32)
    assert read.max_cpu_loras is None
    assert read.tensor_parallel_size == 2 and read.enable_expert_parallel
    assert (read.lora_modules, read.lora_dir, read.lora_experts) == ({}, "/", False)
    where = folders(service(lora=lora).spec)
    claimed, from_image = (where[name].split("/")[2] for name in ("org/chat", "tone"))
    assert where == {
        "sql": "/model/adapters/sql",
        "org/chat": f"/adapters/{claimed}/v2",
        "tone": f"/adapters/{from_image}",
    }
    mounts = {mount["name"]: mount for mount in found["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in found["volumes"]}
    assert mounts[claimed]["mountPath"] == f"/adapters/{claimed}" and mounts[claimed]["readOnly"]
    claim = {"claimName": "lora", "readOnly": True}
    assert volumes[claimed]["persistentVolumeClaim"] == claim
    image = {"reference": "registry/tone:1", "pullPolicy": "IfNotPresent"}
    assert volumes[from_image]["image"] == image
    for name in ("ENABLE_LORA", "QUEUE_SHARDS"):
        assert f"{PREFIX}{name}" not in env(), "older images do not know this setting"


def test_adapters_in_volumes_that_pods_have_change_no_pod() -> None:
    claim = {"claimName": "lora"}
    first = {"name": "a", "persistentVolumeClaim": {**claim, "path": "a"}}
    more: list[dict[str, Any]] = [
        {"name": "b", "persistentVolumeClaim": {**claim, "path": "b"}},
        {"name": "c", "path": "/model/c"},
        {**first, "name": "d"},
    ]
    new_volume = {"name": "e", "persistentVolumeClaim": {"claimName": "other"}}

    def template(*adapters: dict[str, Any]) -> dict[str, Any]:
        return pod(lora={"adapters": list(adapters)})

    assert template(first) == template(*more) == template(*reversed(more))
    assert template(first) != template(first, new_volume)


def test_engines_with_a_queue_of_their_own_have_adapters_as_settings() -> None:
    lora = {"adapters": [{"name": "sql", "path": "/model/sql"}], "experts": True}
    values = env(lora=lora, queue={"urlSecret": {"name": "queue", "key": "url"}})

    assert values["HEADRACE_ENGINE_LORA_MODULES"] == '{"sql": "/model/sql"}'
    assert values["HEADRACE_ENGINE_LORA_EXPERTS"] == "true"
    assert "HEADRACE_ENGINE_LORA_DIR" not in values


def test_engines_fetch_adapters_from_object_storage_with_a_secret() -> None:
    bucket = {"name": "sql", "uri": "s3://adapters/sql"}
    storage = {
        "endpoint": "http://minio:9000",
        "region": "eu-1",
        "credentialsSecret": "s3",
    }
    lora = {"adapters": [bucket], "objectStorage": storage}
    values = env(lora=lora)
    assert (values["AWS_ENDPOINT_URL"], values["AWS_REGION"]) == ("http://minio:9000", "eu-1")
    assert values["HEADRACE_ENGINE_LORA_OBJECT_STORAGE"] == "true"
    (container,) = pod(lora=lora)["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "s3"}}]
    assert folders(service(lora=lora).spec) == {"sql": "s3://adapters/sql"}
    policy = network_policy(service(model={"local": {"path": "/m"}}, lora=lora), PLATFORM)
    assert policy is not None
    assert {port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]} == {
        *(53, 6379, 9000)
    }


def test_low_priority_that_yields_leaves_room_on_engines() -> None:
    scaling = {"lowPriority": "Yield", "targets": {"utilization": 0.6}}
    assert env(scaling=scaling)["HEADRACE_ENGINE_LOW_PRIORITY_SHARE"] == "0.6"
    assert "HEADRACE_ENGINE_LOW_PRIORITY_SHARE" not in env(), "older images do not know it"


def test_adapters_in_a_known_object_store_change_no_pod() -> None:
    more = [{"name": "sql", "uri": "s3://adapters/sql"}]
    assert pod(lora={"adapters": more, "objectStorage": {}}) == pod(
        lora={"adapters": [], "objectStorage": {}}
    )
    assert "LORA_OBJECT_STORAGE" not in str(pod(lora={"adapters": []})), "older images"


def test_the_grace_period_outlasts_the_drain() -> None:
    found = pod(drain={"timeoutSeconds": 90})
    assert found["terminationGracePeriodSeconds"] == 105
    assert env(drain={"timeoutSeconds": 90})["HEADRACE_ENGINE_DRAIN_TIMEOUT"] == "90"


def test_a_drained_engine_waits_until_its_pod_ends() -> None:
    assert env()["HEADRACE_ENGINE_AFTER_DRAIN"] == "wait"
    assert pod()["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": 1}}}


def test_requests_for_a_deleted_model_stay_queued_if_the_spec_asks_for_it() -> None:
    assert "HEADRACE_ENGINE_HOLD_WAITING" not in env()
    assert env(deletion={"waitingRequests": "Hold"})["HEADRACE_ENGINE_HOLD_WAITING"] == "true"


def test_a_gpu_is_requested_by_type_and_used() -> None:
    gpu = {"count": 1, "product": "NVIDIA-H100-80GB-HBM3"}
    found = pod(engine={"gpu": gpu, "nodeSelector": {"pool": "a"}})
    assert found["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert found["nodeSelector"] == {
        "pool": "a",
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
    }
    assert env(engine={"gpu": gpu})["HEADRACE_ENGINE_DEVICE"] == "cuda"
    assert env()["HEADRACE_ENGINE_DEVICE"] == "cpu"
    assert "HEADRACE_ENGINE_TENSOR_PARALLEL_SIZE" not in env()
    assert "HEADRACE_ENGINE_ENABLE_EXPERT_PARALLEL" not in env()


@pytest.mark.parametrize("gpu", [{}, {"count": 4}])
def test_an_engine_of_several_ranks_gets_a_gpu_for_each(gpu: dict[str, int]) -> None:
    engine = {"gpu": gpu, "tensorParallelSize": 4}
    assert container(engine=engine)["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert env(engine=engine)["HEADRACE_ENGINE_TENSOR_PARALLEL_SIZE"] == "4"
    assert "limits" not in container(engine={"tensorParallelSize": 2})["resources"], "cores"


def test_resources_are_passed_on() -> None:
    resources = {"requests": {"cpu": "4"}, "limits": {"memory": "16Gi"}}
    assert container(engine={"resources": resources})["resources"] == resources


def test_shared_memory_and_writable_folders_are_volumes() -> None:
    found = pod(engine={"sharedMemory": "8Gi"})
    mounts = {m["mountPath"]: m["name"] for m in found["containers"][0]["volumeMounts"]}
    assert mounts == {"/tmp": "tmp", "/dev/shm": "shm", "/var/cache/headrace": "cache"}
    volumes = {volume["name"]: volume for volume in found["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}


def test_pods_are_restricted() -> None:
    found = pod(model={"uri": {"uri": "s3://b/m"}})
    assert found["automountServiceAccountToken"] is False
    assert found["securityContext"]["runAsNonRoot"] is True
    assert found["securityContext"]["runAsUser"] == 10001
    assert found["securityContext"]["fsGroup"] == 10001
    assert found["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for each in (*found["containers"], *found["initContainers"]):
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_probes_use_the_metrics_port() -> None:
    found = container(engine={"startupTimeoutSeconds": 95})
    paths = {
        probe: found[probe]["httpGet"]["path"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert paths == {
        "startupProbe": "/health/live",
        "livenessProbe": "/health/live",
        "readinessProbe": "/health/ready",
    }
    startup = found["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] >= 95
    assert startup["periodSeconds"] <= 2, "an engine that is ready would wait"


def test_rollouts_surge_first() -> None:
    found = deployment(service(), PLATFORM, replicas=3)
    assert found["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert found["spec"]["replicas"] == 3


def test_the_selector_does_not_depend_on_the_spec() -> None:
    one = deployment(service(), PLATFORM, replicas=1)["spec"]
    two = deployment(
        service(engine={"image": "x:2", "podLabels": {"a": "b"}}), PLATFORM, replicas=2
    )
    assert one["selector"] == two["spec"]["selector"]
    labels = two["spec"]["template"]["metadata"]["labels"]
    assert one["selector"]["matchLabels"].items() <= labels.items()
    assert labels["a"] == "b"


def test_pod_labels_cannot_break_the_selector() -> None:
    found = deployment(
        service(engine={"podLabels": {names.MODEL_SERVICE: "evil"}}), PLATFORM, replicas=1
    )
    assert found["spec"]["template"]["metadata"]["labels"][names.MODEL_SERVICE] == "qwen"


def test_a_hub_token_comes_from_its_secret() -> None:
    hub = {"id": "org/m", "tokenSecret": {"name": "hf"}, "endpoint": "https://mirror"}
    values = env(model={"hub": hub})
    assert values["HF_TOKEN"] == {"secretKeyRef": {"name": "hf", "key": "token"}}
    assert values["HF_ENDPOINT"] == "https://mirror"
    assert "HEADRACE_ENGINE_REVISION" not in values


def test_a_local_model_needs_no_volume_and_no_egress() -> None:
    owner: dict[str, Any] = {"model": {"local": {"path": "headrace-demo"}}}
    assert env(**owner)["HEADRACE_ENGINE_MODEL"] == "headrace-demo"
    assert {volume["name"] for volume in pod(**owner)["volumes"]} == {"tmp", "shm", "cache"}
    policy = network_policy(service(**owner), PLATFORM)
    assert policy is not None
    assert [rule["ports"][0]["port"] for rule in policy["spec"]["egress"]] == [53, 6379]


def test_an_engine_registers_in_the_name_of_its_model_service() -> None:
    assert env()["HEADRACE_ENGINE_OWNER"] == "models/qwen"
    assert "HEADRACE_ENGINE_REGISTER_MODEL" not in env()


def test_a_claim_is_mounted_read_only() -> None:
    claim = {"claimName": "weights", "path": "qwen/8b"}
    found = pod(model={"persistentVolumeClaim": claim})
    reference = {"claimName": "weights", "readOnly": True}
    assert {"name": "model", "persistentVolumeClaim": reference} in found["volumes"]
    mount = {"name": "model", "mountPath": "/model", "readOnly": True}
    assert mount in found["containers"][0]["volumeMounts"]
    values = env(model={"persistentVolumeClaim": claim})
    assert values["HEADRACE_ENGINE_MODEL"] == "/model/qwen/8b"


def test_an_image_is_an_image_volume() -> None:
    found = pod(model={"image": {"reference": "oci://registry/m:1"}})
    reference = {"reference": "registry/m:1", "pullPolicy": "IfNotPresent"}
    assert {"name": "model", "image": reference} in found["volumes"]


@pytest.mark.parametrize(
    ("uri", "source", "variables"),
    [
        (
            {"uri": "s3://bucket/models/q/", "region": "eu-1"},
            ":s3:bucket/models/q",
            {
                "RCLONE_S3_ENV_AUTH": "true",
                "RCLONE_S3_PROVIDER": "AWS",
                "RCLONE_S3_REGION": "eu-1",
            },
        ),
        (
            {"uri": "s3://b/m", "endpoint": "http://minio:9000"},
            ":s3:b/m",
            {
                "RCLONE_S3_ENV_AUTH": "true",
                "RCLONE_S3_PROVIDER": "Other",
                "RCLONE_S3_ENDPOINT": "http://minio:9000",
            },
        ),
        ({"uri": "gs://b/m"}, ":gcs:b/m", {"RCLONE_GCS_ENV_AUTH": "true"}),
    ],
)
def test_a_uri_is_copied_by_an_init_container(
    uri: Manifest, source: str, variables: Manifest
) -> None:
    found = pod(model={"uri": {**uri, "credentialsSecret": "keys", "sizeLimit": "20Gi"}})
    (copier,) = found["initContainers"]
    assert copier["args"][:3] == ["copy", source, "/model"]
    values = {variable["name"]: variable["value"] for variable in copier["env"]}
    assert values == {"HOME": "/tmp", **variables}
    assert copier["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert {"name": "model", "emptyDir": {"sizeLimit": "20Gi"}} in found["volumes"]


def test_a_doctor_has_the_environment_of_the_engine() -> None:
    found = pod(model={"uri": {"uri": "s3://b/m"}}, engine={"doctor": True, "gpu": {}})
    copier, doctor = found["initContainers"]
    (engine,) = found["containers"]
    assert (copier["name"], doctor["name"]) != (names.DOCTOR, names.CONTAINER)
    assert doctor["command"] == ["headrace", "doctor", "--engine"]
    for field in ("image", "env", "resources", "securityContext", "volumeMounts"):
        assert doctor[field] == engine[field]
    assert "readinessProbe" not in doctor and "ports" not in doctor
    assert "initContainers" not in pod()


def test_the_users_variables_and_flags_take_precedence() -> None:
    own = [{"name": "HEADRACE_ENGINE_DEVICE", "value": "cuda:1"}, {"name": "X", "value": "1"}]
    found = container(engine={"env": own, "extraArgs": ["--threads", "4"]})
    named = [variable["name"] for variable in found["env"]]
    assert len(named) == len(set(named)), "server-side apply refuses a name twice"
    assert {"name": "HEADRACE_ENGINE_DEVICE", "value": "cuda:1"} in found["env"]
    assert found["args"] == ["--threads", "4"]


def test_the_queue_url_comes_from_a_secret_if_there_is_one() -> None:
    platform = replace(PLATFORM, queue_secret=("redis", "url"), queue_ca_secret="ca")
    found = spec_of(deployment(service(), platform, replicas=1))
    (variable,) = [
        v for v in found["containers"][0]["env"] if v["name"] == "HEADRACE_ENGINE_REDIS_URL"
    ]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "redis", "key": "url"}}
    assert {"name": "queue-ca", "secret": {"secretName": "ca"}} in found["volumes"]
    own = service(queue={"urlSecret": {"name": "mine"}})
    (variable,) = [
        v
        for v in spec_of(deployment(own, platform, replicas=1))["containers"][0]["env"]
        if v["name"] == "HEADRACE_ENGINE_REDIS_URL"
    ]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": "mine", "key": "url"}}


def test_engines_seal_with_the_keyring_of_the_release() -> None:
    platform = replace(PLATFORM, sealing_secret="keys", sealing_mode="accept")
    found = spec_of(deployment(service(), platform, replicas=1))
    (engine,) = found["containers"]
    given = {variable["name"]: variable.get("value") for variable in engine["env"]}

    assert {"name": "sealing", "secret": {"secretName": "keys"}} in found["volumes"]
    (mount,) = [mount for mount in engine["volumeMounts"] if mount["name"] == "sealing"]
    assert mount["readOnly"]
    assert given["HEADRACE_ENGINE_SEALING_KEYS_FILE"] == f"{mount['mountPath']}/keyring"
    assert given["HEADRACE_ENGINE_SEALING_MODE"] == "accept"
    plain = spec_of(deployment(service(), PLATFORM, replicas=1))
    assert "SEALING" not in str(plain) and "sealing" not in str(plain)


def test_scheduling_fields_are_passed_on() -> None:
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    found = pod(
        engine={
            "tolerations": [{"key": "gpu"}],
            "affinity": {"podAntiAffinity": {}},
            "topologySpreadConstraints": [spread],
            "priorityClassName": "high",
            "runtimeClassName": "nvidia",
            "schedulerName": "volcano",
            "imagePullSecrets": ["pull"],
        }
    )
    assert found["tolerations"] == [{"key": "gpu"}]
    assert found["affinity"] == {"podAntiAffinity": {}}
    assert found["topologySpreadConstraints"] == [
        {**spread, "labelSelector": {"matchLabels": names.selector("qwen")}}
    ]
    assert found["priorityClassName"] == "high"
    assert found["runtimeClassName"] == "nvidia"
    assert found["schedulerName"] == "volcano"
    assert found["imagePullSecrets"] == [{"name": "pull"}]


def test_a_canary_differs_only_in_image_and_revision() -> None:
    owner = service(canary={"revision": "def", "image": "engine:2", "replicas": 2})
    found = canary_of(owner, PLATFORM)
    assert found is not None
    stable = deployment(owner, PLATFORM, replicas=1)
    assert found["metadata"]["name"] == "qwen-engine-canary"
    assert found["spec"]["replicas"] == 2
    assert spec_of(found)["containers"][0]["image"] == "engine:2"
    environment = spec_of(found)["containers"][0]["env"]
    assert {"name": "HEADRACE_ENGINE_REVISION", "value": "def"} in environment
    assert {"name": "HEADRACE_ENGINE_VARIANT", "value": "canary"} in environment
    assert {"name": "HEADRACE_ENGINE_REGISTER_MODEL", "value": "false"} in environment
    assert found["spec"]["selector"] != stable["spec"]["selector"]
    assert canary_of(service(), PLATFORM) is None
    stopped = canary_of(owner, PLATFORM, stopped=True)
    assert stopped is not None
    assert stopped["spec"]["replicas"] == 0


def test_only_the_companions_of_the_spec_are_made() -> None:
    kinds = [found["kind"] for found in companions_of(service(), PLATFORM)]
    assert kinds == [
        "ServiceAccount",
        "NetworkPolicy",
        "Service",
        "PodDisruptionBudget",
    ]
    more = service(
        engine={"cache": {"persistent": True, "size": "100Gi", "storageClassName": "fast"}},
        monitoring={"serviceMonitor": True, "labels": {"release": "prom"}},
        scaling={"mode": "hpa"},
        networkPolicy={"enabled": False},
    )
    kinds = [found["kind"] for found in companions_of(more, PLATFORM)]
    assert kinds == [
        "ServiceAccount",
        "PersistentVolumeClaim",
        "Service",
        "PodDisruptionBudget",
        "ServiceMonitor",
        "HorizontalPodAutoscaler",
    ]
    found = {manifest["metadata"]["name"] for manifest in companions_of(more, PLATFORM)}
    assert more.name not in found, "an object of the release may have this name"
    gone = {(child.kind, child.optional) for child in unwanted(more)}
    assert gone == {("Deployment", False), ("NetworkPolicy", False), ("ScaledObject", True)}


def test_the_cache_claim_is_mounted() -> None:
    cache = {"persistent": True, "size": "9Gi", "accessMode": "ReadWriteOnce"}
    claim = companions.cache_claim(service(engine={"cache": cache}))
    assert claim is not None
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "9Gi"}},
    }
    volume = {"name": "cache", "persistentVolumeClaim": {"claimName": "qwen-cache"}}
    assert volume in pod(engine={"cache": cache})["volumes"]


def test_every_child_is_owned_and_labelled() -> None:
    everything = service(
        scaling={"mode": "keda", "prometheusUrl": PROMETHEUS},
        monitoring={"serviceMonitor": True},
        engine={"cache": {"persistent": True}},
    )
    for found in (
        *companions_of(everything, PLATFORM),
        deployment(everything, PLATFORM, replicas=1),
    ):
        (owner,) = found["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == ("uid-1", True)
        assert names.labels("qwen").items() <= found["metadata"]["labels"].items()
        assert found["metadata"]["namespace"] == "models"


def test_engines_may_reach_what_they_need() -> None:
    platform = replace(PLATFORM, otlp_endpoint="http://otel:4318", metrics_namespaces=("mon",))
    found = network_policy(service(), platform)
    assert found is not None
    ports = {port["port"] for rule in found["spec"]["egress"] for port in rule["ports"]}
    assert ports == {53, 6379, 4318, 443}
    (scrapers,) = found["spec"]["ingress"]
    assert scrapers["ports"] == [{"protocol": "TCP", "port": 9400}]
    assert len(scrapers["from"]) == 2
    for endpoint, port in (("https://otlp.example.com", 443), ("http://otel:9999/v1", 9999)):
        found = network_policy(service(), replace(PLATFORM, otlp_endpoint=endpoint))
        assert found is not None
        assert {"ports": [{"protocol": "TCP", "port": port}]} in found["spec"]["egress"]
    local = network_policy(service(model={"image": {"reference": "r/m:1"}}), PLATFORM)
    assert local is not None
    ports = {port["port"] for rule in local["spec"]["egress"] for port in rule["ports"]}
    assert ports == {53, 6379}, "a model from a volume needs no egress"


def test_extra_egress_is_added() -> None:
    rule: Manifest = {"to": [{"podSelector": {}}]}
    found = network_policy(service(networkPolicy={"extraEgress": [rule]}), PLATFORM)
    assert found is not None
    assert rule in found["spec"]["egress"]


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("redis://h:6380/0", 6380),
        ("redis://u:p@h/0", 6379),
        ("rediss://u:7@h:1/0", 1),
        ("redis://[::1]:7000", 7000),
    ],
)
def test_port_of_a_url(url: str, port: int) -> None:
    assert port_of(url, 6379) == port


def test_autoscalers_set_the_model_service_and_not_the_deployment() -> None:
    target = {"apiVersion": "headrace.dev/v1alpha1", "kind": "ModelService", "name": "qwen"}
    hpa = autoscaler(service(scaling={"mode": "hpa", "minReplicas": 2, "maxReplicas": 9}))
    assert hpa is not None
    assert hpa["spec"]["scaleTargetRef"] == target
    assert (hpa["spec"]["minReplicas"], hpa["spec"]["maxReplicas"]) == (2, 9)
    keda = autoscaler(
        service(scaling={"mode": "keda", "minReplicas": 0, "prometheusUrl": PROMETHEUS})
    )
    assert keda is not None
    assert keda["spec"]["scaleTargetRef"] == target
    assert keda["spec"]["minReplicaCount"] == 0
    (trigger,) = keda["spec"]["triggers"]
    assert trigger["metadata"]["query"] == backlog_query("qwen")
    for mode in ("operator", "none"):
        assert autoscaler(service(scaling={"mode": mode})) is None


def test_the_backlog_counts_running_requests_too() -> None:
    assert backlog_query('a"b') == (
        'max(headrace_queue_depth{gen_ai_request_model="a\\"b"})'
        ' + max(headrace_queue_pending{gen_ai_request_model="a\\"b"})'
    )


def test_the_default_behavior_is_the_operators() -> None:
    rules = {"scaleDown": {"stabilizationWindowSeconds": 60, "policies": []}}
    found = autoscaler(service(scaling={"mode": "hpa", "behavior": rules}))
    assert found is not None
    down = found["spec"]["behavior"]["scaleDown"]
    assert down["stabilizationWindowSeconds"] == 60
    assert {"type": "Pods", "value": 1, "periodSeconds": 60} in down["policies"]
