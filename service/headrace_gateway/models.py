"""The models that this gateway serves: their tokenizers, templates and limits, loaded at start."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace_common.chat_template import ChatTemplate, load_chat_template
from headrace_common.checkpoint import TokenizerError, read_json, resolve
from headrace_common.errors import SettingsError
from headrace_common.tokenizer import Tokenizer

from .errors import ApiError
from .settings import GatewaySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model under the name that clients use. `max_model_len` is the checkpoint's own limit."""

    name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    max_model_len: int | None
    created: int


class Models:
    """All served models by name. The first is used where a request names none."""

    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        assert models
        self._models = dict(models)

    @classmethod
    def load(cls, settings: GatewaySettings) -> "Models":
        """Loads what the settings name. Raises SettingsError with the setting at fault."""
        template = Path(settings.chat_template) if settings.chat_template else None
        first = _load(settings.name, settings.model, settings, template=template)
        others = {
            name: _load(name, source, settings) for name, source in settings.extra_models.items()
        }
        return cls({first.name: first, **others})

    def get(self, name: str | None) -> ServedModel:
        """Raises ApiError (404) for a model that is not served."""
        if name is None:
            return next(iter(self._models.values()))
        if name not in self._models:
            raise ApiError(
                404,
                f"The model {name[:200]!r} is not served here; served: {', '.join(self._models)}.",
                param="model",
                code="model_not_found",
            )
        return self._models[name]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._models)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())


def _load(
    name: str, source: str, settings: GatewaySettings, *, template: Path | None = None
) -> ServedModel:
    try:
        folder = resolve(source, settings.revision)
        tokenizer = Tokenizer.load(folder)
        chat_template = load_chat_template(folder, tokenizer, file=template)
        config = read_json(folder / "config.json")
    except (TokenizerError, OSError) as error:
        raise SettingsError(f"model {name!r}: {error}") from error
    return ServedModel(
        name=name,
        tokenizer=tokenizer,
        chat_template=chat_template,
        max_model_len=settings.max_model_len or _positions(config),
        created=int(time.time()),
    )


def _positions(config: Mapping[str, object]) -> int | None:
    text_config = config.get("text_config")
    source = text_config if isinstance(text_config, dict) else config
    value = source.get("max_position_embeddings", source.get("n_positions"))
    return value if isinstance(value, int) and value > 0 else None
