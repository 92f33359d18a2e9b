"""Compiles what requests must match in a thread of its own, so that neither the event loop nor the
engine's steps wait for it."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from .errors import RequestError
from .grammar.compiler import GrammarCompiler
from .request import EngineRequest


class Compilation:
    """Used on the event loop's thread. `compiler` None: this engine has no tokenizer for it.

    `compiled` is told how many seconds each request waited for it.
    """

    def __init__(self, compiler: GrammarCompiler | None, compiled: Callable[[float], None]) -> None:
        self._compiler = compiler
        self._compiled = compiled
        self._executor = ThreadPoolExecutor(1, "grammar")

    async def complete(self, request: EngineRequest) -> EngineRequest:
        """The request with its grammar. Raises RequestError."""
        structured = request.params.structured_outputs
        if structured is None:
            return request
        if self._compiler is None:
            raise RequestError("structured_outputs need llguidance and a tokenizer in the engine")
        running_loop = asyncio.get_running_loop()
        begun = time.perf_counter()
        compiled = running_loop.run_in_executor(self._executor, self._compiler.compile, structured)
        grammar = await compiled
        self._compiled(time.perf_counter() - begun)
        return replace(request, grammar=grammar)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
