"""Registers the model that this engine serves, and registers it again if Redis lost the entry.

Gateways need its tokenizer, chat template and limits; the engine has the files. The entry does not
mention engines, and stays when they end.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace_common.errors import BackendUnavailable, HeadraceError, SettingsError
from headrace_common.protocol.registry import ModelRegistry, RegisteredModel, digest_of
from headrace_common.text.chat_template import find_chat_template
from headrace_common.text.checkpoint import CheckpointFiles, read_files
from headrace_common.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CHECK_S = 30.0
# Shorter than usual, since gateways do not know a model whose registration failed.
RETRY_S = 2.0


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model that gateways need, and the tokenizer loaded from them."""

    files: CheckpointFiles
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model's files are. `chat_template` is a file that replaces the checkpoint's."""

    model: str
    revision: str | None = None
    chat_template: str | None = None

    def read(self) -> ModelFiles:
        """Reads the files and checks that they load, since a gateway could only log a failure.

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


class ModelRegistration:
    """One model's entry in the registry, with the names of its LoRA `adapters`.

    `files` were just read from `source`, and serve the first entry. For `holds` and `images` see
    RegisteredModel. `clock` returns Unix seconds.
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
        holds: bool = False,
        images: bool = False,
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
        self._holds = holds
        self._images = images
        self._clock = clock
        self._sleep = sleep
        self._registered = False

    async def announce(self) -> None:
        """Registers the model. If Redis is unreachable, `keep` does it later. Raises
        HeadraceError."""
        try:
            await self._register()
        except BackendUnavailable as error:
            # A full Redis also refuses entries, and only engines can empty it, so the start
            # continues.
            logger.warning("redis unavailable, model not registered", extra={"error": str(error)})

    async def keep(self, unless: Callable[[], bool]) -> None:
        """Registers the model again whenever its entry is gone, except while `unless()`."""
        while True:
            await self._sleep(CHECK_S if self._registered else RETRY_S)
            if not unless():
                await self._renew()

    async def _renew(self) -> None:
        try:
            if not self._registered or await self._registry.registered(self._name) is None:
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
            holds=self._holds,
            images=self._images,
        )
        known = await self._registry.registered(self._name)
        entry = entry.since(known)
        if known is not None and known.owner != entry.owner:
            logger.warning(
                "the model was registered by another owner",
                extra={"model": self._name, "owner": known.owner, "new_owner": entry.owner},
            )
        if known != entry:
            await self._registry.register(entry, files.contents)
        self._registered, self._files = True, None  # they are read again the next time
        logger.info("model registered", extra={"model": self._name, "digest": entry.digest})
