"""Grammars are compiled off the event loop and timed; errors name the field."""

import asyncio
import threading
from unittest.mock import Mock

import pytest

from headrace_common.pools.limited_pool import TaskLimits
from headrace_common.structured.grammar_checks import CheckBounds, GrammarChecks
from headrace_common.structured.refused_grammars import LocalRefusedGrammars
from headrace_common.structured.structured import StructuredOutputsParams
from headrace_common.text.checkpoint import demo_folder
from headrace_common.text.tokenizer import Tokenizer
from headrace_engine import SamplingParams
from headrace_engine.core.compiled_grammar import CompiledGrammar
from headrace_engine.core.errors import RequestError
from headrace_engine.core.request import EngineRequest
from headrace_engine.serving.grammar_compilation import GrammarCompilation
from headrace_engine.structured_output.compiler import GrammarCompiler
from headrace_testing.pool_tasks import costly_schema


def request(structured: StructuredOutputsParams | None) -> EngineRequest:
    params = SamplingParams(structured_outputs=structured)
    return EngineRequest(request_id="r", prompt_token_ids=(5,), params=params, seed=1)


@pytest.fixture
def checks() -> GrammarChecks:
    return GrammarChecks(CheckBounds(max_wait=None), LocalRefusedGrammars())


class SlowCompiler(GrammarCompiler):
    """Compiles when `go` is set."""

    def __init__(self) -> None:
        super().__init__(Tokenizer.load(demo_folder()), 2048, frozenset({0}))
        self.go = threading.Event()

    def compile(self, structured: StructuredOutputsParams) -> CompiledGrammar:
        assert self.go.wait(30)
        return super().compile(structured)


async def test_the_event_loop_is_not_blocked_while_a_grammar_is_compiled(
    checks: GrammarChecks,
) -> None:
    compiler, seconds = SlowCompiler(), list[float]()
    compilation = GrammarCompilation(compiler, checks, seconds.append)
    waiting = asyncio.create_task(compilation.complete(request(StructuredOutputsParams(regex="a"))))
    await asyncio.sleep(0)
    plain = request(None)
    assert await compilation.complete(plain) is plain and not waiting.done()

    compiler.go.set()
    done = await waiting

    assert done.grammar is not None and done.request_id == "r" and len(seconds) == 1
    await compilation.close()


async def test_grammars_that_cannot_be_compiled_are_refused(checks: GrammarChecks) -> None:
    compiler = SlowCompiler()
    compiler.go.set()
    compilation = GrammarCompilation(compiler, checks, lambda _: None)

    with pytest.raises(RequestError, match="unclosed group"):
        await compilation.complete(request(StructuredOutputsParams(regex="(a")))
    await compilation.close()


async def test_without_a_compiler_grammars_are_refused(checks: GrammarChecks) -> None:
    compilation = GrammarCompilation(None, checks, lambda _: None)

    with pytest.raises(RequestError, match="llguidance and a tokenizer"):
        await compilation.complete(request(StructuredOutputsParams(regex="a")))
    await compilation.close()


async def test_too_costly_grammars_never_reach_the_engines_thread() -> None:
    limits = TaskLimits(timeout=200, cpu_seconds=1, memory_bytes=64 * 2**20)
    checks = GrammarChecks(CheckBounds(limits=limits, max_wait=None), LocalRefusedGrammars())
    compiler = Mock(spec=GrammarCompiler, find=Mock(return_value=None))
    compilation = GrammarCompilation(compiler, checks, lambda _: None)

    with pytest.raises(RequestError, match=r"^structured_outputs\.json: takes over"):
        await compilation.complete(request(StructuredOutputsParams(json=costly_schema())))
    compiler.compile.assert_not_called()
    await compilation.close()
