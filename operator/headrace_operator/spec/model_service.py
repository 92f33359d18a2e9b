"""A parsed ModelService; no other module reads raw objects of this kind.

`ModelService.parse` gives a frozen value or raises InvalidSpec. Reads no cluster and no settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from .. import names
from ..errors import InvalidSpec
from .lora_section import LoRASpec
from .scaling_section import ScalingSpec
from .sections import (
    CanarySpec,
    DeletionSpec,
    DrainSpec,
    EngineSpec,
    ModelSpec,
    MonitoringSpec,
    NetworkPolicySpec,
    QueueSpec,
    SharingSpec,
    SpecSection,
)


class ModelServiceSpec(SpecSection):
    cel: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "!has(self.canary) || !has(self.canary.revision) || has(self.model.hub)",
            "canary.revision needs model.hub",
        ),
        (
            "!has(self.scaling) || !has(self.scaling.mode) || self.scaling.mode != 'keda' "
            "|| has(self.scaling.prometheusUrl)",
            "mode keda needs scaling.prometheusUrl",
        ),
        (
            "!has(self.sharing) || !has(self.scaling) || !has(self.scaling.maxReplicas) "
            "|| self.scaling.maxReplicas == 1",
            "engines that share an accelerator are awake one at a time: scaling.maxReplicas must "
            "be 1",
        ),
        (
            "!has(self.sharing) || !has(self.engine) || !has(self.engine.tensorParallelSize) "
            "|| self.engine.tensorParallelSize == 1",
            "sharing does not support engine.tensorParallelSize above 1",
        ),
        (
            "!has(self.canary) || !has(self.engine) || !has(self.engine.nodes) "
            "|| self.engine.nodes == 1",
            "canary does not support engine.nodes above 1; make a second ModelService for a trial",
        ),
    )
    model: ModelSpec
    """Where the checkpoint comes from."""
    engine: EngineSpec = EngineSpec()
    """How engines run."""
    lora: LoRASpec | None = None
    """LoRA adapters of the model."""
    replicas: int = Field(1, ge=0, le=1000)
    """Engines wanted, for `kubectl scale` and autoscalers. Read in every mode but operator."""
    scaling: ScalingSpec = ScalingSpec()
    """How many engines run."""
    sharing: SharingSpec | None = None
    """An accelerator that the engine shares with those of other ModelServices."""
    drain: DrainSpec = DrainSpec()
    """The handling of running requests when engines leave."""
    deletion: DeletionSpec = DeletionSpec()
    """The handling of the model's requests when the ModelService is deleted."""
    canary: CanarySpec | None = None
    """Some engines of another revision beside the others."""
    queue: QueueSpec = QueueSpec()
    """Where the requests come from."""
    monitoring: MonitoringSpec = MonitoringSpec()
    """Who scrapes the engines."""
    network_policy: NetworkPolicySpec = NetworkPolicySpec()
    """The network destinations that engines may reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelService:
    """One served model. `generation` counts changes of its spec."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: ModelServiceSpec

    @property
    def served_name(self) -> str:
        return self.spec.model.served_name or self.name

    @property
    def owner(self) -> str:
        """The name of this object in the registry of models."""
        return f"{self.namespace}/{self.name}"

    @property
    def sharing_group(self) -> str | None:
        """The group in which the engine shares an accelerator. Its name is that of the queue, which
        several namespaces may use."""
        sharing = self.spec.sharing
        return None if sharing is None else f"{self.namespace}/{sharing.group}"

    @property
    def promoted(self) -> "ModelService":
        """The service as it is once its stable engines run what its canary runs."""
        canary = self.spec.canary
        assert canary is not None, "there is a canary"
        model, engine = self.spec.model, self.spec.engine
        if canary.image is not None:
            engine = engine.model_copy(update={"image": canary.image})
        if canary.revision is not None and model.hub is not None:
            hub = model.hub.model_copy(update={"revision": canary.revision})
            model = model.model_copy(update={"hub": hub})
        spec = self.spec.model_copy(update={"model": model, "engine": engine})
        return replace(self, spec=spec)

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> "ModelService":
        """Parses an object from the API server. Raises InvalidSpec for the first problem."""
        meta = body["metadata"]
        _check_name(meta["name"])
        try:
            spec = ModelServiceSpec.model_validate(body.get("spec") or {})
        except ValidationError as error:
            raise _invalid(error.errors(include_url=False)[0]) from error
        _check_references(spec)
        return cls(
            name=meta["name"],
            namespace=meta["namespace"],
            uid=meta.get("uid", ""),
            generation=meta.get("generation", 0),
            spec=spec,
        )


def _check_name(name: str) -> None:
    if len(name) > names.MAX_NAME_CHARS or "." in name:
        raise InvalidSpec(
            "metadata.name",
            f"{name!r} must have at most {names.MAX_NAME_CHARS} characters and no dot, "
            "for pods and services to be named after it",
        )


def _check_references(spec: ModelServiceSpec) -> None:
    """Checks that concern several sections; the schema has the same rules where possible."""
    if spec.canary is not None and spec.canary.revision is not None and spec.model.hub is None:
        raise InvalidSpec("spec.canary.revision", spec.cel[0][1])
    if spec.scaling.mode == "keda" and spec.scaling.prometheus_url is None:
        raise InvalidSpec("spec.scaling.prometheusUrl", spec.cel[1][1])
    if spec.sharing is not None and spec.scaling.max_replicas != 1:
        raise InvalidSpec("spec.scaling.maxReplicas", spec.cel[2][1])
    if spec.sharing is not None and spec.engine.tensor_parallel_size != 1:
        raise InvalidSpec("spec.engine.tensorParallelSize", spec.cel[3][1])
    if spec.canary is not None and spec.engine.nodes != 1:
        raise InvalidSpec("spec.engine.nodes", spec.cel[4][1])


def _invalid(problem: ErrorDetails) -> InvalidSpec:
    path = ["spec", *(part for part in problem["loc"] if part not in ("str", "int"))]
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] not in ("missing", "value_error", "extra_forbidden"):
        message = f"{problem['input']!r:.80} is wrong: {message[:1].lower()}{message[1:]}"
    return InvalidSpec(".".join(str(part) for part in path), message)
