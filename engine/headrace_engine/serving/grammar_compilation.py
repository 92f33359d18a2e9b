"""Compiles the grammars of requests, without delaying the event loop or the engine's steps.

A disposable process first checks that a grammar compiles within limits. The engine compiles only
grammars that pass there, whatever the gateway has checked.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from headrace_common.structured.grammar_checks import GrammarChecks, GrammarsBusy
from headrace_common.structured.structured import StructuredOutputError, StructuredOutputsParams

from ..core.compiled_grammar import CompiledGrammar
from ..core.errors import RequestError
from ..core.request import EngineRequest
from ..structured_output.compiler import GrammarCompiler


class GrammarCompilation:
    """Compiles in a thread; its methods are called on the event loop's thread.

    `compiler` is None if the engine has no tokenizer. `compiled` gets the seconds that each request
    waited for its grammar.
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
        """Returns the request with its compiled grammar and its limit of reasoning.

        Raises RequestError.
        """
        if self._compiler is not None and request.params.thinking_token_budget is not None:
            request = replace(request, thinking=self._compiler.thinking.make(request.params))
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
        """Repeats a check that times out, perhaps by load; after some timeouts it fails."""
        while True:
            try:
                return await self._checks.check(structured, tenant)
            except GrammarsBusy:
                continue
