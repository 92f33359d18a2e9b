"""Tells gateways of the model that this engine serves, and tells them again if Redis forgets.

Gateways need tokenizer, chat template and limits; the engine has the files. The entry says nothing
of engines: it stays when they go.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace_common.chat_template import find_chat_template
from headrace_common.checkpoint import CheckpointFiles, read_files
from headrace_common.errors import BackendUnavailable, HeadraceError, SettingsError
from headrace_common.protocol.registry import ModelRegistry, RegisteredModel, digest_of
from headrace_common.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CHECK_S = 30.0
# While the model could not be registered, gateways may not know it at all.
RETRY_S = 2.0


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What gateways need of a model, and the tokenizer in it."""

    files: CheckpointFiles
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where the files are. `chat_template` is a file that replaces the checkpoint's own."""

    model: str
    revision: str | None = None
    chat_template: str | None = None

    def read(self) -> ModelFiles:
        """The files, which gateways can load: tried here, since they could only log it.

        Raises TokenizerError, ChatTemplateError, or SettingsError for the chat template's file.
        """
        files = self._read()
        tokenizer = Tokenizer.from_files(files)
        find_chat_template(files, tokenizer)
        return ModelFiles(files, tokenizer)

    def _read(self) -> CheckpointFiles:
        files = read_files(self.model, self.revision)
        if self.chat_template is None:
            return files
        try:
            return files.with_chat_template(Path(self.chat_template).read_bytes())
        except OSError as error:
            raise SettingsError(f"chat_template: {error}") from error


class Registration:
    """One model's entry in the registry, with the names of its LoRA `adapters`.

    `files` is what has been read of `source` just now, for the first entry. Times in seconds;
    `clock` gives Unix seconds.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        source: ModelSource,
        *,
        name: str,
        max_model_len: int,
        owner: str = "",
        files: CheckpointFiles | None = None,
        adapters: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._registry = registry
        self._source = source
        self._name = name
        self._max_model_len = max_model_len
        self._owner = owner
        self._files = files
        self._adapters = tuple(adapters)
        self._clock = clock
        self._sleep = sleep
        self._registered = False

    async def announce(self) -> None:
        """Registers the model; without Redis, `keep` does so later. Raises HeadraceError."""
        try:
            await self._register()
        except BackendUnavailable as error:
            # A full Redis refuses entries too, and needs engines that empty it.
            logger.warning("redis unavailable, model not registered", extra={"error": str(error)})

    async def keep(self, unless: Callable[[], bool]) -> None:
        """Registers the model again whenever its entry is gone, for ever, unless told not to."""
        while True:
            await self._sleep(CHECK_S if self._registered else RETRY_S)
            if not unless():
                await self._renew()

    async def _renew(self) -> None:
        try:
            if not self._registered or self._name not in await self._registry.models():
                self._registered = False
                await self._register()
        except (HeadraceError, OSError) as error:
            logger.warning("model not registered, will retry", extra={"error": str(error)})

    async def _register(self) -> None:
        files = self._files or (await asyncio.to_thread(self._source.read)).files
        entry = RegisteredModel(
            name=self._name,
            digest=await asyncio.to_thread(digest_of, files.contents),
            max_model_len=self._max_model_len,
            created=int(self._clock()),
            owner=self._owner,
            adapters=self._adapters,
        )
        known = (await self._registry.models()).get(self._name)
        entry = entry.since(known)
        if known is not None and known.owner != entry.owner:
            logger.warning(
                "the model was registered by another owner",
                extra={"model": self._name, "owner": known.owner, "new_owner": entry.owner},
            )
        if known != entry:
            await self._registry.register(entry, files.contents)
        self._registered, self._files = True, None  # another time they may be others
        logger.info("model registered", extra={"model": self._name, "digest": entry.digest})
