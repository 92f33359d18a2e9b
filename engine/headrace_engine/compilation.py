"""Compiles what requests must match, so that neither the event loop nor the engine's steps wait.

A process that may be killed finds out first whether it can be compiled within limits: whatever the
gateway has seen, this one's thread compiles only what passes there.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from headrace_common.grammar_checks import GrammarChecks, GrammarsBusy
from headrace_common.structured import StructuredOutputError, StructuredOutputsParams

from .errors import RequestError
from .grammar.compiled import CompiledGrammar
from .grammar.compiler import GrammarCompiler
from .request import EngineRequest


class Compilation:
    """Used on the event loop's thread. `compiler` None: this engine has no tokenizer for it.

    `compiled` is told how many seconds each request waited for it.
    """

    def __init__(
        self,
        compiler: GrammarCompiler | None,
        checks: GrammarChecks,
        compiled: Callable[[float], None],
    ) -> None:
        self._compiler = compiler
        self._checks = checks
        self._compiled = compiled
        self._executor = ThreadPoolExecutor(1, "grammar")

    async def complete(self, request: EngineRequest) -> EngineRequest:
        """The request with its grammar. Raises RequestError."""
        structured = request.params.structured_outputs
        if structured is None:
            return request
        if self._compiler is None:
            raise RequestError("structured_outputs need llguidance and a tokenizer in the engine")
        begun = time.perf_counter()
        grammar = self._compiler.find(structured)
        if grammar is None:
            grammar = await self._compile(self._compiler, structured, request.tenant)
        self._compiled(time.perf_counter() - begun)
        return replace(request, grammar=grammar)

    async def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        await self._checks.close()

    async def _compile(
        self, compiler: GrammarCompiler, structured: StructuredOutputsParams, tenant: str
    ) -> CompiledGrammar:
        try:
            await self._check(structured, tenant)
        except StructuredOutputError as error:
            raise RequestError(f"structured_outputs.{error}") from error
        running_loop = asyncio.get_running_loop()
        return await running_loop.run_in_executor(self._executor, compiler.compile, structured)

    async def _check(self, structured: StructuredOutputsParams, tenant: str) -> None:
        """A timeout may be this machine's fault; after a few of them it is the grammar's."""
        while True:
            try:
                return await self._checks.check(structured, tenant)
            except GrammarsBusy:
                continue
