"""The offline API: `LLM(model).generate(prompts, SamplingParams(...))`, with vLLM's names.

Runs the engine in the caller's thread until all prompts are finished, without queue or server.
"""

import gc
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, TypedDict

from tqdm import tqdm

from headrace_common.sampling.params import SamplingParams
from headrace_common.sampling.pooling import PoolingParams
from headrace_common.text.bad_words import with_spelled_bad_words
from headrace_common.text.checkpoint import local_source
from headrace_common.text.tokenizer import Tokenizer

from ..checkpoints.checkpoint import Checkpoint, load_checkpoint
from ..core.compiled_grammar import CompiledGrammar
from ..core.config import EngineConfig
from ..core.errors import ConfigError, RequestError
from ..core.request import EngineRequest
from ..core.speculative_config import SpeculativeConfig
from ..core.thinking import ThinkingBudget
from ..engine.engine import Engine
from ..lora.request import LoRARequest
from ..model_runner.model_runner import ModelRunner
from ..scheduler.policies import make_policy
from ..structured_output.compiler import GrammarCompiler
from ..structured_output.thinking_budgets import ThinkingBudgets
from .beams import BeamSearchOutput, BeamSearchParams, beam_output
from .embeddings import EmbeddingRequestOutput, embed
from .outputs import CompletionOutput, RequestOutput
from .request import RunningRequest


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


Prompt = str | TextPrompt | TokensPrompt
Message = Mapping[str, Any]
# One adapter for all prompts, or one for each.
AdapterChoice = LoRARequest | Sequence[LoRARequest | None] | None

# vLLM's names of settings that have other names here.
ALIASES = {"gpu_memory_utilization": "memory_utilization"}


@dataclass(frozen=True, slots=True)
class _Prompt:
    text: str | None
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class _RequestOptions:
    """Options of a request for scheduling policies, and its adapter; `timeout` is in seconds."""

    priority: int = 0
    tenant: str = "default"
    timeout: float = inf
    lora: str | None = None


class LLM:
    """A model, loaded once and used for any number of calls, by one thread at a time.

    Its constructor exempts all objects alive from Python's garbage collection (`gc.freeze`).

    `options` are fields of EngineConfig; `speculative_config` may be a dictionary, as in vLLM.
    `tokenizer` is a folder or hub id; default: the model's. With `skip_tokenizer_init` there is no
    tokenizer, and prompts must be token ids.

    Raises ConfigError, CheckpointError or headrace_common's TokenizerError.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        skip_tokenizer_init: bool = False,
        **options: Any,
    ) -> None:
        self._config = _config(model, options)
        self._checkpoint: Checkpoint = load_checkpoint(self._config.model, self._config.revision)
        self._source = tokenizer or str(self._checkpoint.folder)
        self._tokenizer = None if skip_tokenizer_init else Tokenizer.load(self._source)
        policy = make_policy(self._config.policy, self._config.policy_options)
        self._runner = ModelRunner(self._config)
        self._runner.warm_up()
        self._engine = Engine(self._config, self._runner, policy)
        self._random = random.Random(self._config.seed)  # noqa: S311  sampling, not secrets
        self._counter = 0
        self._grammars: GrammarCompiler | None = None
        self._thinking: ThinkingBudgets | None = None
        # Present objects stay alive: the collector need not visit them between steps.
        gc.collect()
        gc.freeze()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ConfigError if the LLM was made without one."""
        if self._tokenizer is None:
            raise ConfigError("skip_tokenizer_init is set, so there is no tokenizer")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults, updated with the checkpoint's generation_config.json."""
        generation = self._checkpoint.generation_config
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        chosen = {name: generation[name] for name in names if generation.get(name) is not None}
        if generation.get("max_new_tokens") is not None:
            chosen["max_tokens"] = generation["max_new_tokens"]
        return SamplingParams(**chosen)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "default",
        timeout: float | Sequence[float] | None = None,
        lora_request: AdapterChoice = None,
    ) -> list[RequestOutput]:
        """Generates an output for each prompt, in the prompts' order.

        Each parameter (but `use_tqdm`) is one value for all prompts or a list with one for each.
        The scheduling policy uses `priority` (lower is sooner), `tenant` and `timeout` (seconds).
        `lora_request` is the adapter to run with. Raises RequestError before anything runs if the
        engine cannot run a prompt, and CheckpointError or ConfigError for an adapter.
        """
        given = _listed(prompts)
        options = _request_options(len(given), priority, tenant, timeout)
        options = self._adapt(options, lora_request)
        read = [self._read(prompt) for prompt in given]
        return self._run(read, sampling_params, use_tqdm, options)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: AdapterChoice = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, through the checkpoint's chat template.

        `chat_template` is the text of another template. Raises ConfigError if there is none.
        """
        from headrace_common.text.chat_template import ChatTemplate, encode_chat, load_chat_template

        tokenizer = self.get_tokenizer()
        template = (
            load_chat_template(self._source, tokenizer)
            if chat_template is None
            else ChatTemplate(chat_template, tokenizer.special_tokens)
        )
        if template is None:
            raise ConfigError(f"{self._source} has no chat template: pass chat_template")
        prompts = [
            encode_chat(
                tokenizer,
                template,
                conversation,
                tools=tools,
                variables=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            for conversation in _conversations(messages)
        ]
        decoded = [tokenizer.decode(ids, skip_special_tokens=False) for ids in prompts]
        given = [_Prompt(text, ids) for text, ids in zip(decoded, prompts, strict=True)]
        options = self._adapt([_RequestOptions()] * len(given), lora_request)
        return self._run(given, sampling_params, use_tqdm, options)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Embeds each prompt with an embedding model (see `task`). Raises RequestError."""
        ids = [self._read(prompt).token_ids for prompt in _listed(prompts)]
        return embed(self._engine, ids, pooling_params or PoolingParams(), use_tqdm=use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = False,
        lora_request: AdapterChoice = None,
    ) -> list[BeamSearchOutput]:
        """The best beams of each prompt, as transformers' `generate(num_beams=...)` finds them.

        Raises RequestError if the beams cannot run at once: see BeamSearchParams.
        """
        outputs = self.generate(prompts, params.sampling(), use_tqdm, lora_request=lora_request)
        return [beam_output(output, params) for output in outputs]

    def _adapt(
        self, options: Sequence[_RequestOptions], lora_request: AdapterChoice
    ) -> list[_RequestOptions]:
        """Adds the adapters to the options and registers them with the runner."""
        chosen = _for_each("lora_request", lora_request, len(options), LoRARequest | None)
        for request in filter(None, dict.fromkeys(chosen)):
            adapters = self._runner.adapters
            if adapters is None:
                raise RequestError("lora_request needs an LLM that was made with enable_lora=True")
            adapters.add(request.lora_name, request.folder)
        return [
            each if request is None else replace(each, lora=request.lora_name)
            for each, request in zip(options, chosen, strict=True)
        ]

    def _read(self, prompt: Any) -> _Prompt:
        if isinstance(prompt, str):
            return _Prompt(prompt, self.get_tokenizer().encode(prompt))
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            return _Prompt(None, list(prompt["prompt_token_ids"]))
        if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt"), str):
            return self._read(str(prompt["prompt"]))
        raise RequestError(
            "a prompt must be a text, {'prompt': text} or {'prompt_token_ids': [...]}, not "
            f"{prompt!r:.80}"
        )

    def _run(
        self,
        prompts: list[_Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        options: Sequence[_RequestOptions],
    ) -> list[RequestOutput]:
        params = self._match(sampling_params, len(prompts))
        running: dict[str, RunningRequest] = {}
        try:
            for prompt, one, each in zip(prompts, params, options, strict=True):
                request = self._start(prompt, one, each)
                running[request.output.request_id] = request
            self._finish(running, use_tqdm)
        finally:
            for request_id, request in running.items():
                if not request.output.finished:
                    self._engine.abort(request_id)
        return [request.output for request in running.values()]

    def _match(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        return _for_each("sampling_params", params, count, SamplingParams)

    def _start(
        self, prompt: _Prompt, params: SamplingParams, options: _RequestOptions
    ) -> RunningRequest:
        if self._tokenizer is None and params.stop:
            raise RequestError("stop strings need a tokenizer: leave skip_tokenizer_init off")
        request_id = str(self._counter)
        self._counter += 1
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        now = time.monotonic()
        grammar = self._compile(params)
        thinking = self._limit_thinking(params)
        self._engine.add_request(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=tuple(prompt.token_ids),
                params=self._spelled(params),
                grammar=grammar,
                thinking=thinking,
                seed=seed,
                arrival=now,
                priority=options.priority,
                deadline=now + options.timeout,
                tenant=options.tenant,
                lora=options.lora,
            )
        )
        choices = [CompletionOutput(index) for index in range(params.n)]
        output = RequestOutput(request_id, prompt.text, prompt.token_ids, choices)
        return RunningRequest(output, params, self._tokenizer)

    def _compile(self, params: SamplingParams) -> CompiledGrammar | None:
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            runner = self._runner
            self._grammars = GrammarCompiler(
                self.get_tokenizer(), runner.vocab_size, runner.eos_token_ids
            )
        return self._grammars.compile(params.structured_outputs)

    def _limit_thinking(self, params: SamplingParams) -> ThinkingBudget | None:
        if params.thinking_token_budget is None:
            return None
        if self._thinking is None:
            self._thinking = ThinkingBudgets(self.get_tokenizer())
        return self._thinking.make(params)

    def _spelled(self, params: SamplingParams) -> SamplingParams:
        if not params.bad_words:
            return params
        return with_spelled_bad_words(params, self.get_tokenizer())

    def _finish(self, running: Mapping[str, RunningRequest], use_tqdm: bool) -> None:
        with _Progress(len(running), use_tqdm) as progress:
            while self._engine.has_work:
                touched: dict[str, RunningRequest] = {}
                for step in self._engine.step():
                    request = touched[step.request_id] = running[step.request_id]
                    progress.tokens(len(step.token_ids))
                    if request.push(step):
                        self._engine.abort(step.request_id, step.choice)
                for request in touched.values():
                    if request.output.finished:
                        progress.finished(len(request.output.prompt_token_ids))


class _Progress:
    """vLLM's progress bar: finished prompts, with the speed of input and output tokens."""

    def __init__(self, total: int, shown: bool) -> None:
        self._bar: Any = tqdm(
            total=total, desc="Processed prompts", dynamic_ncols=True, disable=not shown
        )
        self._input = self._output = 0

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def tokens(self, count: int) -> None:
        self._output += count

    def finished(self, prompt_tokens: int) -> None:
        self._input += prompt_tokens
        if not self._bar.disable:
            elapsed = max(1e-9, float(self._bar.format_dict["elapsed"]))
            speeds = (total / elapsed for total in (self._input, self._output))
            self._bar.set_postfix_str("input {:.1f} tok/s, output {:.1f} tok/s".format(*speeds))
        self._bar.update()


def _config(model: str, options: dict[str, Any]) -> EngineConfig:
    renamed = {ALIASES.get(name, name): value for name, value in options.items()}
    known = {field.name for field in fields(EngineConfig)}
    unknown = sorted(set(renamed) - known)
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]}; known are {', '.join(sorted(known))}")
    speculation = renamed.get("speculative_config")
    if isinstance(speculation, Mapping):
        renamed["speculative_config"] = SpeculativeConfig.of(speculation)
    return EngineConfig(model=local_source(model), **renamed)


def _request_options(
    count: int,
    priority: int | Sequence[int],
    tenant: str | Sequence[str],
    timeout: float | Sequence[float] | None,
) -> list[_RequestOptions]:
    """One set of options for each prompt. Raises RequestError for a list of another length."""
    lists = (
        _for_each("priority", priority, count, int),
        _for_each("tenant", tenant, count, str),
        _for_each("timeout", inf if timeout is None else timeout, count, int | float),
    )
    return [_RequestOptions(*values) for values in zip(*lists, strict=True)]


def _for_each(name: str, value: Any, count: int, single: Any) -> list[Any]:
    """`value` for each of `count` prompts if it is a `single` one, else the list that it is."""
    each = [value] * count if isinstance(value, single) else list(value)
    if len(each) != count:
        raise RequestError(
            f"{name} has {len(each)} entries for {count} prompts: give one value, or one for each"
        )
    return each


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    return [prompts] if isinstance(prompts, str | Mapping) else list(prompts)


def _conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> Iterable[Sequence[Message]]:
    many: Any = messages if messages and not isinstance(messages[0], Mapping) else [messages]
    return list(many)
