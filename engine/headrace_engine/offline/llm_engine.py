"""`LLMEngine`: requests are added at any time, and each call of `step` returns what is new."""

from collections.abc import Iterable
from math import inf
from typing import Any

from headrace_common.sampling import params as common

from ..core.errors import RequestError
from ..lora.request import LoRARequest
from .engine_args import EngineArgs
from .loaded_model import DEFAULT_TENANT, LoadedModel, RequestOptions
from .outputs import RequestOutput
from .prompts import Prompt, ReadPrompt, read_prompt
from .request import RunningRequest
from .sampling_params import RequestOutputKind
from .tokenizer import ChatTokenizer


class LLMEngine:
    """A model whose steps the caller runs, in one thread. Raises the errors of LoadedModel."""

    def __init__(self, args: EngineArgs) -> None:
        self.model = LoadedModel(args)
        self._running: dict[str, RunningRequest] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **_: Any) -> "LLMEngine":
        return cls(engine_args)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: common.SamplingParams,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
        timeout: float = inf,
    ) -> None:
        """Queues a request; the arguments are those of `LLM.generate`.

        Raises RequestError if this engine cannot run it.
        """
        if not isinstance(params, common.SamplingParams):
            raise RequestError("params must be SamplingParams: use LLM.embed for embeddings")
        if request_id in self._running:
            raise RequestError(f"request_id {request_id!r:.80} is running: give each its own")
        options = RequestOptions(priority, tenant, timeout, lora_request)
        self.add(request_id, read_prompt(prompt, self.model.tokenizer), params, options)

    def add(
        self,
        request_id: str,
        prompt: ReadPrompt,
        params: common.SamplingParams,
        options: RequestOptions,
        kind: RequestOutputKind | None = None,
    ) -> None:
        """Like `add_request`, for a prompt that has been read. `kind` replaces `output_kind`."""
        request, running = self.model.prepare(request_id, prompt, params, options, kind)
        self.model.engine.add_request(request)
        self._running[request_id] = running

    def step(self) -> list[RequestOutput]:
        """Runs one step; returns the outputs of the requests in it, in the form of their
        `output_kind`."""
        touched = {}
        for output in self.model.engine.step():
            running = self._running.get(output.request_id)
            if running is None:
                continue
            touched[output.request_id] = running
            if running.push(output):
                self.model.engine.abort(output.request_id, output.choice)
        for request_id, running in touched.items():
            if running.output.finished:
                del self._running[request_id]
        return [taken for one in touched.values() if (taken := one.take()) is not None]

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests without further outputs. Ignores unknown ones."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            self._running.pop(request_id, None)
            self.model.engine.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def get_num_unfinished_requests(self) -> int:
        return len(self._running)

    def get_tokenizer(self) -> ChatTokenizer:
        """The tokenizer. Raises ConfigError if there is none."""
        return self.model.need_tokenizer()
