"""The sections of a ModelService's spec: fields, defaults, bounds and rules.

The custom resource definition is generated from these classes, so every field is defined here.
`cel` rules are checked by the API server and, in Python, by the validator beside them.
"""

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from headrace_common.wire.keys import MAX_SHARDS

from .forms import (
    Annotations,
    BucketUri,
    Bytes,
    ClaimName,
    Device,
    HttpUrl,
    HubId,
    LocalPath,
    ObjectName,
    Quantity,
    RelativePath,
    VariableName,
)

MAX_RANKS_OF_A_NODE = 16  # the most GPUs that one machine has

Opaque = dict[str, Any]
"""An object of Kubernetes' own API, passed on as it is; the API server checks it."""


class SpecSection(BaseModel):
    """A frozen section that refuses unknown fields. `cel` are (rule, message) pairs."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=to_camel,
        validate_by_name=True,
        serialize_by_alias=True,
        use_attribute_docstrings=True,
    )
    cel: ClassVar[tuple[tuple[str, str], ...]] = ()


class SecretKey(SpecSection):
    name: ObjectName
    """Name of a Secret in the ModelService's namespace."""
    key: str = Field("token", min_length=1, max_length=253)
    """Key inside the Secret."""


class HubModel(SpecSection):
    id: HubId
    """Hub id, as Qwen/Qwen3-8B."""
    revision: str | None = Field(None, min_length=1, max_length=128)
    """Branch, tag or, best, commit. A branch may give two pods different weights."""
    token_secret: SecretKey | None = None
    """Secret with the hub's token, for gated models."""
    endpoint: HttpUrl | None = None
    """Address of a mirror of the hub."""


class ClaimModel(SpecSection):
    claim_name: ClaimName
    """PersistentVolumeClaim that holds the checkpoint; mounted read-only in every engine."""
    path: RelativePath = ""
    """Folder of the checkpoint inside the volume; the volume's root where absent."""


class ImageModel(SpecSection):
    reference: str = Field(min_length=1, max_length=1024)
    """OCI image or artifact with the checkpoint, mounted as an image volume."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When the kubelet pulls it."""
    path: RelativePath = ""
    """Folder of the checkpoint inside the image."""


class UriModel(SpecSection):
    uri: BucketUri
    """s3://bucket/folder or gs://bucket/folder, copied by an init container before each start."""
    endpoint: HttpUrl | None = None
    """Address of a store that speaks S3, where it is not Amazon's."""
    region: str | None = Field(None, min_length=1, max_length=64)
    """Region of the bucket."""
    credentials_secret: ObjectName | None = None
    """Secret whose keys become the copier's environment, as AWS_ACCESS_KEY_ID."""
    size_limit: Quantity | None = None
    """Most that the copy may take of the node's disk."""


class LocalModel(SpecSection):
    path: LocalPath
    """Folder of the checkpoint inside the engine's image, or a bundled model: headrace-demo,
    headrace-demo-embeddings or headrace-demo-vision."""


class ModelSpec(SpecSection):
    cel: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "[has(self.hub), has(self.persistentVolumeClaim), has(self.image), has(self.uri), "
            "has(self.local)].filter(given, given).size() == 1",
            "exactly one of hub, persistentVolumeClaim, image, uri and local must be given",
        ),
    )
    served_name: str | None = Field(None, min_length=1, max_length=256)
    """Name that clients ask for; the ModelService's name where absent."""
    hub: HubModel | None = None
    """From the Hugging Face hub."""
    persistent_volume_claim: ClaimModel | None = None
    """From a volume."""
    image: ImageModel | None = None
    """From an OCI registry."""
    uri: UriModel | None = None
    """From an object store."""
    local: LocalModel | None = None
    """In the engine's image: nothing is fetched."""

    @model_validator(mode="after")
    def _one_source(self) -> "ModelSpec":
        given = [self.hub, self.persistent_volume_claim, self.image, self.uri, self.local]
        if sum(source is not None for source in given) != 1:
            raise ValueError(self.cel[0][1])
        return self


class GpuSpec(SpecSection):
    count: int | None = Field(None, ge=1, le=16)
    """GPUs of one engine, in all its pods together; as many as tensorParallelSize, which it may be
    left to."""
    resource_name: str = Field("nvidia.com/gpu", min_length=1, max_length=253)
    """Extended resource to ask for, as nvidia.com/mig-3g.40gb."""
    product: str | None = Field(None, min_length=1, max_length=63)
    """GPU type: value of the node label nvidia.com/gpu.product."""


class ResourcesSpec(SpecSection):
    requests: dict[str, Quantity] = Field(default_factory=dict, max_length=32)
    """The resources that the scheduler reserves."""
    limits: dict[str, Quantity] = Field(default_factory=dict, max_length=32)
    """The most that the engine may use."""


class EngineSettingsSpec(SpecSection):
    """Settings of the engine process; what is absent keeps the engine's own default."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    """Type of weights and activations."""
    device: Device | None = None
    """Where it runs; cuda where a GPU is asked for, else cpu."""
    attention_backend: str | None = Field(None, min_length=1, max_length=32)
    """auto, reference, cpu, flash or triton."""
    quantization: Literal["none", "int8", "gptq", "awq", "compressed-tensors", "fp8"] | None = None
    """int8 and fp8 keep linear layers in 8 bits; the others are what a checkpoint must be."""
    model_implementation: Literal["auto", "native", "transformers"] | None = None
    """auto is native where the architecture has a native path."""
    chat_template: str | None = Field(None, min_length=1, max_length=1024)
    """File, inside the pod, of a chat template that replaces the checkpoint's own."""
    max_model_len: int | None = Field(None, ge=1)
    """Longest prompt plus output in tokens."""
    block_size: int | None = Field(None, ge=1, le=1024)
    """Tokens a KV block."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] | None = None
    """fp8 keeps keys and values in 8 bits: twice as many tokens as in bfloat16."""
    kv_cache_memory: Bytes | None = None
    """Bytes of KV cache, as 2GiB."""
    num_blocks: int | None = Field(None, ge=1)
    """KV blocks, instead of bytes."""
    memory_utilization: float | None = Field(None, gt=0, le=1, strict=False)
    """Share of the GPU's total memory that may be in use; on CPUs of the available memory."""
    swap_space: float | None = Field(None, ge=0, strict=False)
    """GiB of host memory for KV that the device has no room for."""
    kv_offloading_folder: str | None = Field(None, min_length=1, max_length=4096)
    """Folder in which engines share the KV of prefixes, also after a restart."""
    kv_offloading_folder_size: float | None = Field(None, gt=0, strict=False)
    """GiB of that folder at most, for all engines together."""
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] | None = None
    """kv_producer computes prompts and hands them over, kv_consumer goes on with the answers."""
    max_local_prefill_length: int | None = Field(None, ge=0)
    """Tokens of the longest prompt that a kv_consumer computes itself."""
    remote_prefill_timeout: float | None = Field(None, ge=0, strict=False)
    """Seconds for which an engine leaves a request to engines of the other role."""
    max_num_seqs: int | None = Field(None, ge=1)
    """Sequences that run at once."""
    max_num_batched_tokens: int | None = Field(None, ge=1)
    """Tokens a step."""
    itl_target: float | None = Field(None, gt=0, strict=False)
    """Seconds a step should take at most while requests wait for their next token."""
    enable_prefix_caching: bool | None = None
    """Reuse the KV of equal prompt beginnings."""
    disable_hybrid_kv_cache_manager: bool | None = None
    """One block table for layers with and without a sliding window."""
    watermark: float | None = Field(None, ge=0, lt=1, strict=False)
    """Share of blocks kept free at admission."""
    speculative_config: Opaque | None = None
    """Speculative decoding: method ngram, or a smaller checkpoint as model."""
    limit_mm_per_prompt: Opaque | None = None
    """The most images of a prompt, as image: 4; 0 loads no vision tower."""
    encoder_cache_memory: Bytes | None = None
    """Bytes for the embeddings of images, as 1GiB."""
    max_num_encoder_input_tokens: int | None = Field(None, ge=1)
    """Tokens of images that a step encodes, if it encodes several."""
    task: Literal["auto", "generate", "embed"] | None = None
    """Whether the model generates or embeds; auto asks the checkpoint."""
    pooler_config: Opaque | None = None
    """How a model that embeds does it."""
    policy: str | None = Field(None, min_length=1, max_length=128)
    """Which waiting request is next: fcfs, priority, sjf, fair, deadline, or module:Class."""
    policy_options: Opaque | None = None
    """Options of the policy."""
    lookahead: int | None = Field(None, ge=0)
    """Requests taken beyond those that can start, for the policy to choose from."""
    threads: int | None = Field(None, ge=1)
    """CPU threads."""
    deterministic: bool | None = None
    """The same bits for a request alone, among others, or resumed on another engine."""
    enforce_eager: bool | None = None
    """No CUDA graphs."""
    enable_autotuner: bool | None = None
    """Measure kernels and launch parameters on the GPU at start."""
    tuned_config_folder: str | None = Field(None, min_length=1, max_length=4096)
    """Folder that keeps what was measured."""
    async_scheduling: bool | None = None
    """Plan the next step while the device runs one; default: on GPUs."""
    lease: float | None = Field(None, gt=0, strict=False)
    """Seconds until a silent engine's work is taken."""
    beat_interval: float | None = Field(None, gt=0, strict=False)
    """Seconds between renewals of the lease."""
    step_timeout: float | None = Field(None, gt=0, strict=False)
    """Seconds after which a step counts as hung."""
    grammar_workers: int | None = Field(None, ge=1, le=64)
    """Processes that check schemas, expressions and grammars."""
    grammar_timeout: float | None = Field(None, gt=0, strict=False)
    """Seconds that the check of one grammar may take."""
    grammar_cpu_seconds: int | None = Field(None, ge=1)
    """Seconds of a processor that the check of one grammar may take."""
    grammar_memory: Bytes | None = None
    """Bytes that the check of one grammar may take, as 128MiB."""
    debug_pages: bool | None = None
    """Show steps, requests and profiles on the metrics port, to all who reach it."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] | None = None
    """Least severe log line that is written."""
    log_format: Literal["json", "text"] | None = None
    """Log lines as JSON or as text."""


class RolloutSpec(SpecSection):
    cel: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "!has(self.maxSurge) || !has(self.maxUnavailable) "
            "|| self.maxSurge > 0 || self.maxUnavailable > 0",
            "maxSurge and maxUnavailable must not both be 0",
        ),
    )
    max_surge: int = Field(1, ge=0)
    """Engines above the wanted number during a rollout. 0 needs no spare GPU, but has a gap."""
    max_unavailable: int = Field(0, ge=0)
    """Engines below the wanted number during a rollout."""

    @model_validator(mode="after")
    def _moves(self) -> "RolloutSpec":
        if self.max_surge == self.max_unavailable == 0:
            raise ValueError(self.cel[0][1])
        return self


class CacheSpec(SpecSection):
    size: Quantity = "50Gi"
    """Size of the volume for downloaded weights and compiled kernels."""
    persistent: bool = False
    """Keep it in a PersistentVolumeClaim that all engines share, not with each pod."""
    storage_class_name: ObjectName | None = None
    """Storage class of the claim; the cluster's default where absent."""
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    """ReadWriteOnce keeps all engines on one node."""


class EnvVar(SpecSection):
    name: VariableName
    """Name of the variable."""
    value: str | None = None
    """Its value; a number needs quotes."""
    value_from: Opaque | None = None
    """Where it comes from, as in a container."""

    @property
    def manifest(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, exclude_none=True)


class EngineSpec(SpecSection):
    cel: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "!has(self.gpu) || !has(self.gpu.count) || self.gpu.count == "
            "(has(self.tensorParallelSize) ? self.tensorParallelSize : 1)",
            "gpu.count must be tensorParallelSize, or be left out",
        ),
        (
            "(has(self.tensorParallelSize) ? self.tensorParallelSize : 1) "
            "% (has(self.nodes) ? self.nodes : 1) == 0",
            "tensorParallelSize must be a multiple of nodes: each node runs as many processes",
        ),
        (
            "(has(self.tensorParallelSize) ? self.tensorParallelSize : 1) "
            f"<= {MAX_RANKS_OF_A_NODE} * (has(self.nodes) ? self.nodes : 1)",
            f"tensorParallelSize must be at most {MAX_RANKS_OF_A_NODE} for each of the nodes, as "
            "many GPUs as a machine has: raise nodes",
        ),
    )
    image: str | None = Field(None, min_length=1, max_length=1024)
    """Image of the engine; it sees all that its pod does. The operator's default where absent."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When the kubelet pulls it."""
    image_pull_secrets: tuple[ObjectName, ...] = Field((), max_length=32, strict=False)
    """Names of Secrets with registry credentials."""
    resources: ResourcesSpec = ResourcesSpec()
    """CPU and memory of each pod. GPUs are asked for by `gpu`."""
    gpu: GpuSpec | None = None
    """GPUs of one engine; without it the engine runs on the CPU."""
    tensor_parallel_size: int = Field(1, ge=1, le=64)
    """Processes of an engine that share one copy of the model: each has one of its `gpu`, or some
    of its cores. At most 16 for each of its `nodes`."""
    nodes: int = Field(1, ge=1, le=64)
    """Pods of one engine, which share its tensorParallelSize processes equally: for models that are
    too large for one machine. Several pods are made by LeaderWorkerSet if the cluster has it, else
    by StatefulSets."""
    enable_expert_parallel: bool = False
    """Whether each of these processes has whole experts of a mixture, instead of a part of every
    expert."""
    settings: EngineSettingsSpec = EngineSettingsSpec()
    """Settings of the engine process."""
    extra_args: tuple[str, ...] = Field((), strict=False)
    """Further flags of the engine process, any of them; they win over `settings`."""
    env: tuple[EnvVar, ...] = Field((), max_length=512, strict=False)
    """Further environment variables, as in a container, also from any Secret of the namespace; they
    win over the operator's."""
    env_from: tuple[Opaque, ...] = Field((), strict=False)
    """ConfigMaps and Secrets whose keys become environment variables, as in a container."""
    shared_memory: Quantity = "1Gi"
    """Size of /dev/shm. It counts as the engine's memory."""
    cache: CacheSpec = CacheSpec()
    """Volume for downloaded weights and compiled kernels."""
    doctor: bool = False
    """Run `headrace doctor --engine` as an init container: the engine starts where nothing fails,
    and what to do otherwise is in that container's log. It takes some seconds of each start."""
    startup_timeout_seconds: int = Field(1800, ge=10, le=86400)
    """How long loading the model may take before the engine is restarted."""
    rollout: RolloutSpec = RolloutSpec()
    """How a change reaches the engines. By default a new one is ready before an old one goes.
    StatefulSets always replace one engine after the other."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Node labels that engines need."""
    tolerations: tuple[Opaque, ...] = Field((), strict=False)
    """Taints that engines tolerate."""
    affinity: Opaque = Field(default_factory=dict)
    """Affinity of engines, as in a pod."""
    topology_spread_constraints: tuple[Opaque, ...] = Field((), strict=False)
    """Spread of engines, as in a pod, with the label selector filled in where absent."""
    priority_class_name: ObjectName | None = None
    """Priority class of engines."""
    runtime_class_name: ObjectName | None = None
    """Runtime class of engines."""
    scheduler_name: str | None = Field(None, max_length=253)
    """Scheduler of engines."""
    pod_labels: dict[str, str] = Field(default_factory=dict)
    """Further labels of engine pods."""
    pod_annotations: Annotations = Field(default_factory=dict, max_length=128)
    """Further annotations of engine pods, but none that loosen their isolation."""

    @model_validator(mode="after")
    def _one_gpu_each(self) -> "EngineSpec":
        if self.gpu is not None and self.gpu.count not in (None, self.tensor_parallel_size):
            raise ValueError(self.cel[0][1])
        return self

    @model_validator(mode="after")
    def _as_many_on_each_node(self) -> "EngineSpec":
        if self.tensor_parallel_size % self.nodes:
            raise ValueError(self.cel[1][1])
        if self.ranks_of_a_node > MAX_RANKS_OF_A_NODE:
            raise ValueError(self.cel[2][1])
        return self

    @property
    def ranks_of_a_node(self) -> int:
        """The processes in one pod."""
        return self.tensor_parallel_size // self.nodes


class DrainSpec(SpecSection):
    timeout_seconds: int = Field(300, ge=0, le=86400)
    """How long an engine may finish its work before it gives the rest back to the queue."""


class SharingSpec(SpecSection):
    cel: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "(has(self.minAwakeSeconds) ? self.minAwakeSeconds : 5) "
            "<= (has(self.maxAwakeSeconds) ? self.maxAwakeSeconds : 60)",
            "minAwakeSeconds must not be above maxAwakeSeconds",
        ),
    )
    group: ObjectName
    """Name of the accelerator, in this namespace. ModelServices with the same one take turns: one
    engine is awake, the others sleep. Their pods must be on that accelerator."""
    sleep_level: Literal[1, 2] = 1
    """1 keeps the weights of an engine that sleeps in host memory; 2 drops them, and reads the
    checkpoint again."""
    min_awake_seconds: int = Field(5, ge=0, le=86400)
    """How long an engine with work is awake at least."""
    max_awake_seconds: int = Field(60, ge=1, le=86400)
    """How long it is awake at most while requests wait for others."""
    timeout_seconds: int = Field(10, ge=0, le=86400)
    """How long it may finish running requests before it sleeps; then they are given back."""

    @model_validator(mode="after")
    def _bounds(self) -> "SharingSpec":
        if self.min_awake_seconds > self.max_awake_seconds:
            raise ValueError(self.cel[0][1])
        return self


class DeletionSpec(SpecSection):
    waiting_requests: Literal["Fail", "Hold"] = "Fail"
    """The handling of requests that wait when the ModelService is deleted: they are answered with
    an error, or kept until their deadline for one that serves the same name. A change restarts the
    engines."""


class CanaryAnalysisSpec(SpecSection):
    rollback: bool = True
    """Stop a canary that is worse than the stable engines. It starts again when its image or
    revision changes."""
    min_requests: int = Field(50, ge=1, le=1_000_000)
    """Requests that must have ended on each side before they are compared."""
    max_error_percent: float = Field(5.0, ge=0, le=100)
    """Percentage points by which more of the canary's requests may fail."""
    max_latency_ratio: float = Field(2.0, ge=1, le=1000)
    """How many times as long its mean time to first token and per output token may be."""
    min_agreement_percent: float | None = Field(None, ge=0, le=100)
    """Share of the compared answers that must be equal. Where it is set, gateways repeat some
    greedy requests of the stable engines on the canary, and compare the answers."""
    min_comparisons: int = Field(20, ge=1, le=100_000)
    """Answers that must have been compared before their agreement counts."""
    comparisons_per_minute: int = Field(6, ge=1, le=60)
    """The most requests that all gateways together repeat."""


class CanarySpec(SpecSection):
    cel: ClassVar[tuple[tuple[str, str], ...]] = (
        ("has(self.image) || has(self.revision)", "a canary needs an image or a revision"),
    )
    replicas: int = Field(1, ge=0, le=1000)
    """Engines of the canary."""
    traffic_percent: int = Field(10, ge=0, le=100)
    """Share of the new requests that the canary's engines get, however many they are. A change
    restarts nothing."""
    image: str | None = Field(None, min_length=1, max_length=1024)
    """Engine image of the canary."""
    revision: str | None = Field(None, min_length=1, max_length=128)
    """Hub revision of the canary's model."""
    analysis: CanaryAnalysisSpec = CanaryAnalysisSpec()
    """How it is compared with the stable engines."""
    auto_promotion_seconds: int | None = Field(None, ge=0, le=2_592_000)
    """Seconds for which the canary must have been as good as the stable engines, without a break,
    before they get its image and revision; never where absent. The spec is not changed."""

    @model_validator(mode="after")
    def _differs(self) -> "CanarySpec":
        if self.image is None and self.revision is None:
            raise ValueError(self.cel[0][1])
        return self


class UrlSecret(SpecSection):
    name: ObjectName
    """Name of a Secret in the ModelService's namespace."""
    key: str = Field("url", min_length=1, max_length=253)
    """Key inside the Secret."""


class QueueSpec(SpecSection):
    url_secret: UrlSecret | None = None
    """Secret with the URL of Redis or Valkey; the operator's default where absent."""
    shards: int = Field(1, ge=1, le=MAX_SHARDS)
    """Shards of the model's queue, which may be on different nodes of a Redis cluster. Best 1, 3,
    6, 12 or 24: those are evenly spread."""


class MonitoringSpec(SpecSection):
    service_monitor: bool = False
    """Make a ServiceMonitor, for the Prometheus operator."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels that your Prometheus selects ServiceMonitors by."""
    interval_seconds: int = Field(15, ge=1, le=3600)
    """Seconds between scrapes."""


class NetworkPolicySpec(SpecSection):
    enabled: bool = True
    """Deny engines what they do not need."""
    extra_egress: tuple[Opaque, ...] = Field((), strict=False)
    """Further rules, as in a NetworkPolicy."""
