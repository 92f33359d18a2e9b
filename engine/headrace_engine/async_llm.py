"""`AsyncLLM`: an LLM for asyncio that streams, with vLLM's names and without a queue.

The engine's steps run in their own thread; outputs come to the event loop of each caller.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from itertools import count
from math import inf
from typing import Any

from headrace_common.sampling import params as common

from .core.errors import EngineError, RequestError
from .core.outputs import SequenceOutput
from .core.stats import SchedulerStats
from .engine.engine_loop import EngineLoop
from .lora.request import LoRARequest
from .offline.engine_args import EngineArgs
from .offline.loaded_model import DEFAULT_TENANT, LoadedModel, RequestOptions
from .offline.outputs import RequestOutput
from .offline.prompts import Prompt, read_prompt
from .offline.request import RunningRequest
from .offline.tokenizer import ChatTokenizer

_STOP_SECONDS = 60.0


class AsyncLLM:
    """A model that answers any number of coroutines of one event loop at a time.

    End it with `shutdown`. Raises the errors of LoadedModel.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._model = LoadedModel(args)
        # By the engine's request ids, which are not the callers': a caller may use an id again
        # before the engine has ended the request that had it.
        self._streams: dict[str, _Stream] = {}
        self._numbers = count()
        self._failure: Exception | None = None
        self._loop = EngineLoop(
            self._model.engine,
            on_step=self._on_step,
            on_rejected=self._on_rejected,
            on_failure=self._on_failure,
        )
        self._loop.start()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> "AsyncLLM":
        return cls(engine_args)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: common.SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
        timeout: float = inf,  # noqa: ASYNC109  a field of the request, for the policy
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request as they come; `output_kind` says what each has.

        Ending the iteration aborts the request. Raises RequestError if this engine cannot run it,
        and the engine's error if the engine fails.
        """
        if self._failure is not None or not self._loop.alive:
            raise EngineError("the engine has ended: make a new AsyncLLM") from self._failure
        if self._find(request_id) is not None:
            raise RequestError(f"request_id {request_id!r:.80} is running: give each its own")
        read = read_prompt(prompt, self._model.tokenizer)
        options = RequestOptions(priority, tenant, timeout, lora_request)
        request, running = self._model.prepare(request_id, read, sampling_params, options)
        number = str(next(self._numbers))
        stream = self._streams[number] = _Stream(running)
        self._loop.add(replace(request, request_id=number))
        try:
            while True:
                output = await stream.next()
                yield output
                if output.finished:
                    return
        finally:
            del self._streams[number]
            if not running.output.finished:
                self._loop.abort(number)

    async def abort(self, request_id: str) -> None:
        """Ends a request; its iteration raises RequestError. Ignores unknown ones."""
        stream = self._find(request_id)
        if stream is not None:
            stream.fail(RequestError(f"{request_id!r:.80} was aborted"))

    def get_tokenizer(self) -> ChatTokenizer:
        """The tokenizer. Raises ConfigError if there is none."""
        return self._model.need_tokenizer()

    def shutdown(self) -> None:
        """Ends the engine after its present step; unfinished requests fail."""
        self._loop.stop()
        self._loop.join(_STOP_SECONDS)
        for stream in list(self._streams.values()):
            stream.fail(EngineError("the engine was shut down"))

    def _find(self, request_id: str) -> "_Stream | None":
        """The stream of a caller's id."""
        streams = self._streams.values()
        return next((one for one in streams if one.running.output.request_id == request_id), None)

    def _on_step(self, outputs: list[SequenceOutput], _: SchedulerStats, __: float | None) -> None:
        touched: dict[str, _Stream] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:  # its caller has stopped iterating
                continue
            touched[output.request_id] = stream
            if stream.running.push(output):
                self._loop.abort(output.request_id, output.choice)
        for stream in touched.values():
            taken = stream.running.take()
            if taken is not None:
                stream.put(taken)

    def _on_rejected(self, number: str, error: RequestError) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            stream.fail(error)

    def _on_failure(self, error: Exception) -> None:
        self._failure = error
        for stream in list(self._streams.values()):
            stream.fail(error)


class _Stream:
    """The outputs of one request on their way from the engine's thread to its event loop."""

    def __init__(self, running: RunningRequest) -> None:
        self.running = running
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

    def put(self, output: RequestOutput) -> None:
        self._post(output)

    def fail(self, error: Exception) -> None:
        self._post(error)

    async def next(self) -> RequestOutput:
        output = await self._outputs.get()
        if isinstance(output, Exception):
            raise output
        return output

    def _post(self, item: RequestOutput | Exception) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, item)
