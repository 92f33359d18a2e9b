"""Loads served models from checkpoints' files: models of the settings, and registered models."""

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path

from headrace_common.errors import SettingsError
from headrace_common.images.formats import read_image_format
from headrace_common.protocol.registry import Files, RegisteredModel, digest_of
from headrace_common.text.chat_template import ChatTemplateError, find_chat_template
from headrace_common.text.checkpoint import (
    CheckpointFiles,
    base_config,
    is_cross_encoder,
    read_files,
)
from headrace_common.text.errors import TokenizerError
from headrace_common.text.late_interaction import read_late_interaction
from headrace_common.text.tokenizer import Tokenizer

from ..settings import GatewaySettings
from ..version import package_version
from .models import ServedModel


def load_static(settings: GatewaySettings) -> dict[str, ServedModel]:
    """Loads the models of the settings. Raises SettingsError with the setting at fault."""
    models: dict[str, ServedModel] = {}
    if settings.model is not None and settings.name is not None:
        base = _static(settings.name, settings.model, settings, first=True)
        models[base.name] = base
        models |= {name: base.adapted(name) for name in settings.lora_modules}
    for name, source in settings.extra_models.items():
        models[name] = _static(name, source, settings)
    return models


def load_registered(
    model: RegisteredModel, contents: Files, max_model_len: int | None
) -> ServedModel:
    """Loads a registered model's files: some seconds of CPU work, for a thread.

    Raises TokenizerError or ChatTemplateError.
    """
    files = CheckpointFiles(f"registered model {model.name}", contents)
    tokenizer = Tokenizer.from_files(files)
    return ServedModel(
        name=model.name,
        tokenizer=tokenizer,
        chat_template=find_chat_template(files, tokenizer),
        max_model_len=max_model_len,
        usual_model_len=model.max_model_len,
        created=model.created,
        embedding_size=_hidden_size(files.json("config.json")),
        scores_pairs=is_cross_encoder(files.json("config.json")),
        late_interaction=read_late_interaction(files),
        images=read_image_format(files, tokenizer) if model.images else None,
        system_fingerprint=_fingerprint(files),
        registered=True,
    )


def _static(
    name: str, source: str, settings: GatewaySettings, *, first: bool = False
) -> ServedModel:
    try:
        files = read_files(source, settings.revision)
        if first and settings.chat_template:
            files = files.with_chat_template(Path(settings.chat_template).read_bytes())
        tokenizer = Tokenizer.from_files(files)
        chat_template = find_chat_template(files, tokenizer)
        config = files.json("config.json")
        images = read_image_format(files, tokenizer)
        late_interaction = read_late_interaction(files)
    except (TokenizerError, ChatTemplateError, OSError) as error:
        raise SettingsError(f"model {name!r}: {error}") from error
    return ServedModel(
        name=name,
        tokenizer=tokenizer,
        chat_template=chat_template,
        max_model_len=settings.max_model_len or _positions(config),
        created=int(time.time()),
        embedding_size=_hidden_size(config),
        scores_pairs=is_cross_encoder(config),
        late_interaction=late_interaction,
        images=images,
        system_fingerprint=_fingerprint(files),
    )


def _fingerprint(files: CheckpointFiles) -> str:
    """Returns a fingerprint that is the same at every gateway with these files and this version."""
    parts = f"{package_version()}:{digest_of(files.contents)}"
    return f"fp_{hashlib.sha256(parts.encode()).hexdigest()[:10]}"


def _positions(config: Mapping[str, object]) -> int | None:
    return _number(config, "max_position_embeddings", "n_positions")


def _hidden_size(config: Mapping[str, object]) -> int | None:
    return _number(config, "hidden_size", "dim", "n_embd", "d_model")


def _number(config: Mapping[str, object], *names: str) -> int | None:
    """Returns the first of these fields that the text model has."""
    base = base_config(config)
    text_config = base.get("text_config")
    source = text_config if isinstance(text_config, dict) else base
    value = next((source[name] for name in names if name in source), None)
    return value if isinstance(value, int) and value > 0 else None
