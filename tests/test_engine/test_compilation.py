"""Grammars on their way into the engine: off the event loop, timed, refused by name."""

import asyncio
import threading

import pytest

from headrace_common.checkpoint import demo_folder
from headrace_common.structured import StructuredOutputsParams
from headrace_common.tokenizer import Tokenizer
from headrace_engine import SamplingParams
from headrace_engine.compilation import Compilation
from headrace_engine.errors import RequestError
from headrace_engine.grammar.compiled import CompiledGrammar
from headrace_engine.grammar.compiler import GrammarCompiler
from headrace_engine.request import EngineRequest


def request(structured: StructuredOutputsParams | None) -> EngineRequest:
    params = SamplingParams(structured_outputs=structured)
    return EngineRequest(request_id="r", prompt_token_ids=(5,), params=params, seed=1)


class SlowCompiler(GrammarCompiler):
    """Compiles when it is told to."""

    def __init__(self) -> None:
        super().__init__(Tokenizer.load(demo_folder()), 2048, frozenset({0}))
        self.go = threading.Event()

    def compile(self, structured: StructuredOutputsParams) -> CompiledGrammar:
        assert self.go.wait(30)
        return super().compile(structured)


async def test_the_event_loop_goes_on_while_a_grammar_is_compiled() -> None:
    compiler, seconds = SlowCompiler(), list[float]()
    compilation = Compilation(compiler, seconds.append)
    waiting = asyncio.create_task(compilation.complete(request(StructuredOutputsParams(regex="a"))))
    await asyncio.sleep(0)
    plain = request(None)
    assert await compilation.complete(plain) is plain and not waiting.done()

    compiler.go.set()
    done = await waiting

    assert done.grammar is not None and done.request_id == "r" and len(seconds) == 1
    compilation.close()


async def test_what_cannot_be_compiled_is_refused() -> None:
    compiler = SlowCompiler()
    compiler.go.set()
    compilation = Compilation(compiler, lambda _: None)

    with pytest.raises(RequestError, match="unclosed group"):
        await compilation.complete(request(StructuredOutputsParams(regex="(a")))
    compilation.close()


async def test_an_engine_without_a_compiler_says_so() -> None:
    compilation = Compilation(None, lambda _: None)

    with pytest.raises(RequestError, match="llguidance and a tokenizer"):
        await compilation.complete(request(StructuredOutputsParams(regex="a")))
    compilation.close()
