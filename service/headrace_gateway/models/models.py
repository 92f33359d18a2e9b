"""The models that this gateway serves, under the names that clients use.

Models of the settings are loaded at start and take precedence; the others come and go with the
registry.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from headrace_common.images.layout import ImageFormat
from headrace_common.text.chat_template import ChatTemplate
from headrace_common.text.late_interaction import LateInteraction
from headrace_common.text.tokenizer import Tokenizer

from ..errors import ApiError, invalid, unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model under the name that clients use. Lengths are in tokens of prompt plus output.

    `max_model_len` is an upper limit of the engines' lengths; `usual_model_len` is used while no
    engine reports one. `embedding_size` is the length of its vectors, as far as its files tell;
    `scores_pairs` says that it is a cross-encoder; `late_interaction` is what a model reads that
    makes a vector for each token. `parent` is the base model of a LoRA adapter, else None;
    `lora_version` is set if that was loaded while engines served. `system_fingerprint` tells
    clients when the model has changed. `alias_of` is the model's own name if it is listed under an
    alias. `images` says how it reads images; None if it reads none. `registered`: its files came
    from an engine, which may be a stranger's.
    """

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    max_model_len: int | None
    created: int
    usual_model_len: int | None = None
    embedding_size: int | None = None
    scores_pairs: bool = False
    late_interaction: LateInteraction | None = None
    images: ImageFormat | None = None
    parent: str | None = None
    lora_version: str | None = None
    system_fingerprint: str | None = None
    alias_of: str | None = None
    registered: bool = False

    @property
    def rendered_in_worker(self) -> bool:
        """Whether its template needs a process that can be killed."""
        return self.registered and self.chat_template is not None and not self.chat_template.bounded

    @property
    def embeds_alone(self) -> bool:
        """Whether it embeds an image or a text alone, without a chat template."""
        return self.late_interaction is not None or (self.images is not None and self.images.alone)

    @property
    def queue(self) -> str:
        """The model whose engines serve it."""
        return self.parent or self.own_name

    @property
    def lora(self) -> str | None:
        """The adapter that its engines run it with."""
        return None if self.parent is None else self.own_name

    @property
    def own_name(self) -> str:
        return self.alias_of or self.name

    def known_as(self, name: str) -> "ServedModel":
        """Returns the same model as it is listed under this alias."""
        return self if name == self.name else replace(self, name=name, alias_of=self.name)

    def adapted(self, name: str, version: str | None = None) -> "ServedModel":
        """Returns the same model with the adapter of this name."""
        return replace(self, name=name, parent=self.name, lora_version=version)


_NONE: Mapping[str, str] = MappingProxyType({})


class Discovered(Protocol):
    """Models that are found in the registry."""

    @property
    def served(self) -> Mapping[str, ServedModel]: ...

    @property
    def removed(self) -> Collection[str]:
        """Models that are no longer registered, whose queues may not be empty."""

    def forget(self, model: str) -> None:
        """Forgets a removed model whose queue is empty."""

    @property
    def adapters(self) -> Mapping[str, str]:
        """LoRA adapters, each with its model, which may be in `served` or in the settings."""

    @property
    def adapter_versions(self) -> Mapping[str, str]:
        """The versions of those adapters that were loaded while engines served."""

    async def ensure_loaded(self, name: str | None) -> None:
        """Reads the registry, and waits until this model (None: all) is loaded."""


class Models:
    """All served models by name: `static` ones and those of `discovered`.

    `aliases` are further names of models. A caller that may not use a model does not see its alias.
    """

    def __init__(
        self,
        static: Mapping[str, ServedModel],
        discovered: Discovered | None = None,
        allows: Callable[[str], bool] | None = None,
        *,
        aliases: Mapping[str, str] = _NONE,
    ) -> None:
        self._aliases = aliases
        self._static = dict(static)
        self._discovered = discovered
        self._allows = allows

    def only(self, allows: Callable[[str], bool]) -> "Models":
        """Returns the models that `allows` accepts; to this caller the others do not exist."""
        return Models(self._static, self._discovered, allows, aliases=self._aliases)

    def allows(self, name: str) -> bool:
        """Whether the caller may use the model of that name, whether or not it exists."""
        return self._may_have(self._own(name))

    async def find(self, name: str | None) -> ServedModel:
        """Returns the model as `get` does, but looks for an unknown one first."""
        await self._look_for(None if name is None else self._own(name))
        return self.get(name)

    async def find_former(self, name: str, queue: str) -> ServedModel:
        """Returns the model as `find` does, or an adapter of `queue` that was unloaded."""
        base = self._base(queue)
        try:
            return await self.find(name)
        except ApiError:
            if base is None or name == queue or not self.allows(name):
                raise
            return base.adapted(name)

    def get(self, name: str | None) -> ServedModel:
        """Returns the model of that name; for None the only one, without adapters. Raises
        ApiError."""
        if name is None:
            return _only(self._all())
        model = self._one(self._own(name))
        if model is None:
            names = ", ".join(self.names)
            served = f"served: {names}" if names else "none is registered yet"
            raise ApiError(
                404,
                f"The model {name[:200]!r} is not served here; {served}.",
                param="model",
                code="model_not_found",
            )
        return model

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._all())

    @property
    def queues(self) -> tuple[str, ...]:
        """The models that engines serve: names without adapters."""
        return tuple(dict.fromkeys(model.queue for model in self))

    @property
    def removed(self) -> Collection[str]:
        """Models that are no longer served, whose queues may not be empty."""
        return () if self._discovered is None else tuple(self._discovered.removed)

    def forget(self, model: str) -> None:
        """Forgets a removed model with an empty queue."""
        if self._discovered is not None:
            self._discovered.forget(model)

    async def refresh(self) -> None:
        """Reads the registry again. Raises BackendUnavailable."""
        if self._discovered is not None:
            await self._discovered.ensure_loaded(None)

    async def listed(self) -> list[ServedModel]:
        """Returns all models, followed by those with an alias under each alias.

        If there is none, looks for registered ones first, so that a model whose engine has just
        become ready is not missing. Raises BackendUnavailable if that is not known.
        """
        await self._look_for(None)
        models = self._all()
        aliases = {alias: name for alias, name in self._aliases.items() if alias not in models}
        known = [models[name].known_as(alias) for alias, name in aliases.items() if name in models]
        return [*models.values(), *known]

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._all().values())

    async def _look_for(self, own: str | None) -> None:
        """Looks for the model of this name (None: for any) unless one is known."""
        if self._discovered is not None and not self._has(own) and self._may_have(own):
            await self._discovered.ensure_loaded(own)

    def _own(self, name: str) -> str:
        """Returns the own name of a model."""
        return self._aliases.get(name, name)

    def _may_have(self, name: str | None) -> bool:
        return self._allows is None or name is None or self._allows(name)

    def _has(self, name: str | None) -> bool:
        return bool(self._all()) if name is None else self._one(name) is not None

    def _one(self, name: str) -> ServedModel | None:
        if not self._may_have(name):
            return None
        found = self._base(name)
        parent = None if self._discovered is None else self._discovered.adapters.get(name)
        if found is not None or parent is None:
            return found
        base = self._base(parent)
        return None if base is None else self._adapted(base, name)

    def _adapted(self, base: ServedModel, name: str) -> ServedModel:
        assert self._discovered is not None, "an adapter was found"
        return base.adapted(name, self._discovered.adapter_versions.get(name))

    def _base(self, name: str) -> ServedModel | None:
        known = self._static.get(name)
        if known is not None or self._discovered is None:
            return known
        return self._discovered.served.get(name)

    def _all(self) -> dict[str, ServedModel]:
        """Returns models, followed by their adapters."""
        models = self._static
        if self._discovered is not None:
            bases = {**self._static, **self._discovered.served, **self._static}
            adapters = {
                name: self._adapted(bases[parent], name)
                for name, parent in self._discovered.adapters.items()
                if parent in bases
            }
            models = {**bases, **adapters, **bases}
        if self._allows is None:
            return models
        return {name: model for name, model in models.items() if self._allows(name)}


def _only(models: Mapping[str, ServedModel]) -> ServedModel:
    if not models:
        message = "No model is registered yet, or none that this caller may use."
        raise unavailable(message, code="no_model")
    whole = [model for model in models.values() if model.parent is None] or list(models.values())
    if len(whole) > 1:
        raise invalid(
            f"model: name one of the models that are served here: {', '.join(models)}.",
            param="model",
            code="model_required",
        )
    return whole[0]
