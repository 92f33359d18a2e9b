"""The models that this gateway serves under the names that clients use.

Those of the settings are loaded at start and win; the others come and go with the registry.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from headrace_common.chat_template import ChatTemplate
from headrace_common.tokenizer import Tokenizer

from .errors import ApiError, invalid, unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model under the name that clients use. Lengths are in tokens of prompt plus output.

    `max_model_len` is a limit whatever the engines say, `usual_model_len` what counts while no
    engine says anything.
    """

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    max_model_len: int | None
    created: int
    usual_model_len: int | None = None


class Discovered(Protocol):
    """Models that others tell of."""

    @property
    def served(self) -> Mapping[str, ServedModel]: ...

    async def look(self, name: str | None) -> None:
        """Looks whether there is such a model (None: any), and loads it."""


class Models:
    """All served models by name: `static` ones and those of `discovered`."""

    def __init__(
        self,
        static: Mapping[str, ServedModel],
        discovered: Discovered | None = None,
        allows: Callable[[str], bool] | None = None,
    ) -> None:
        self._static = dict(static)
        self._discovered = discovered
        self._allows = allows

    def only(self, allows: Callable[[str], bool]) -> "Models":
        """The same models, of which the others are not there for whoever asks."""
        return Models(self._static, self._discovered, allows)

    async def find(self, name: str | None) -> ServedModel:
        """As `get`, but a model that is not known is looked for first."""
        if self._discovered is not None and not self._has(name) and self._may_have(name):
            await self._discovered.look(name)
        return self.get(name)

    def get(self, name: str | None) -> ServedModel:
        """The model of that name; for None the only one. Raises ApiError."""
        models = self._all()
        if name is None:
            return _only(models)
        if name not in models:
            served = f"served: {', '.join(models)}" if models else "none is registered yet"
            raise ApiError(
                404,
                f"The model {name[:200]!r} is not served here; {served}.",
                param="model",
                code="model_not_found",
            )
        return models[name]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._all())

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._all().values())

    def _may_have(self, name: str | None) -> bool:
        return self._allows is None or name is None or self._allows(name)

    def _has(self, name: str | None) -> bool:
        models = self._all()
        return bool(models) if name is None else name in models

    def _all(self) -> dict[str, ServedModel]:
        models = self._static
        if self._discovered is not None:
            models = {**self._static, **self._discovered.served, **self._static}
        if self._allows is None:
            return models
        return {name: model for name, model in models.items() if self._allows(name)}


def _only(models: Mapping[str, ServedModel]) -> ServedModel:
    if not models:
        raise unavailable("No model is registered yet.", code="no_model")
    if len(models) > 1:
        raise invalid(
            f"model: name one of the models that are served here: {', '.join(models)}.",
            param="model",
            code="model_required",
        )
    return next(iter(models.values()))
