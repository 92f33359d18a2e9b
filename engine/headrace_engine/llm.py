"""The offline API: `LLM(model).generate(prompts, SamplingParams(...))`, with vLLM's names.

Runs the engine in the caller's thread until every prompt is done; holds no queue and no server.
"""

import gc
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any, TypedDict

from tqdm import tqdm

from headrace_common.bad_words import with_spelled_bad_words
from headrace_common.checkpoint import local_source
from headrace_common.pooling import PoolingParams
from headrace_common.sampling import SamplingParams
from headrace_common.tokenizer import Tokenizer

from .config import EngineConfig
from .engine import Engine
from .errors import ConfigError, RequestError
from .grammar.compiled import CompiledGrammar
from .grammar.compiler import GrammarCompiler
from .llm_beams import BeamSearchOutput, BeamSearchParams, beam_output
from .llm_embeddings import EmbeddingRequestOutput, embed
from .llm_outputs import CompletionOutput, RequestOutput
from .llm_request import RunningRequest
from .lora.request import LoRARequest
from .model.checkpoint import Checkpoint, load_checkpoint
from .policies import make_policy
from .request import EngineRequest
from .runner import ModelRunner
from .speculation.config import SpeculativeConfig


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


Prompt = str | TextPrompt | TokensPrompt
Message = Mapping[str, Any]
# One adapter for all prompts, or one each.
AdapterChoice = LoRARequest | Sequence[LoRARequest | None] | None

# vLLM's names of settings that are called otherwise here.
ALIASES = {"gpu_memory_utilization": "memory_utilization"}


@dataclass(frozen=True, slots=True)
class _Prompt:
    text: str | None
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class _Place:
    """What scheduling policies look at; `timeout` in seconds."""

    priority: int = 0
    tenant: str = "default"
    timeout: float = inf
    lora: str | None = None


class LLM:
    """A model, loaded once and used for any number of calls; one thread at a time.

    Making one freezes Python's garbage collector for all objects that are alive by then.

    `options` are the fields of EngineConfig; `speculative_config` may be a dictionary, as in vLLM.
    `tokenizer` is a folder or hub id of its own where it is not the model's; `skip_tokenizer_init`
    loads none, and prompts are then token ids.

    Raises ConfigError, CheckpointError or headrace_common's TokenizerError: they say what is wrong.
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
        # What is alive now stays: the collector need not look at it again between steps.
        gc.collect()
        gc.freeze()

    def get_tokenizer(self) -> Tokenizer:
        """Raises ConfigError where the LLM was made without one."""
        if self._tokenizer is None:
            raise ConfigError("skip_tokenizer_init is set, so there is no tokenizer")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults, with what the checkpoint's generation_config.json sets."""
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
        """One output a prompt, in the prompts' order; one set of parameters for all, or one each.

        `priority` (lower is sooner), `tenant` and `timeout` (seconds) are what scheduling policies
        look at, for all or one each; so is `lora_request`, the adapter that prompts run with.
        Raises RequestError, before anything runs, for a prompt that the engine cannot take, and
        CheckpointError or ConfigError for an adapter.
        """
        single = isinstance(prompts, str | Mapping)
        given: list[Any] = [prompts] if single else list(prompts)
        places = _places(len(given), priority, tenant, timeout)
        places = self._adapt(places, lora_request)
        read = [self._read(prompt) for prompt in given]
        return self._run(read, sampling_params, use_tqdm, places)

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

        `chat_template` is the text of another template. Raises ConfigError where there is none.
        """
        from headrace_common.chat_template import ChatTemplate, encode_chat, load_chat_template

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
        places = self._adapt([_Place()] * len(given), lora_request)
        return self._run(given, sampling_params, use_tqdm, places)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """One vector a prompt, of a model that embeds (`task`). Raises RequestError."""
        single = isinstance(prompts, str | Mapping)
        given: list[Any] = [prompts] if single else list(prompts)
        ids = [self._read(prompt).token_ids for prompt in given]
        return embed(self._engine, ids, pooling_params or PoolingParams(), use_tqdm=use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = False,
        lora_request: AdapterChoice = None,
    ) -> list[BeamSearchOutput]:
        """The best beams of each prompt, as transformers' `generate(num_beams=...)` finds them.

        Raises RequestError where the beams cannot run together: see BeamSearchParams.
        """
        outputs = self.generate(prompts, params.sampling(), use_tqdm, lora_request=lora_request)
        return [beam_output(output, params) for output in outputs]

    def _adapt(self, places: Sequence[_Place], lora_request: AdapterChoice) -> list[_Place]:
        """The places with their adapters, which become known to the engine."""
        if lora_request is None or isinstance(lora_request, LoRARequest):
            lora_request = [lora_request] * len(places)
        chosen = list(lora_request)
        if len(chosen) != len(places):
            raise RequestError(f"lora_request has {len(chosen)} entries for {len(places)} prompts")
        for request in filter(None, dict.fromkeys(chosen)):
            adapters = self._runner.adapters
            if adapters is None:
                raise RequestError("lora_request needs an LLM that was made with enable_lora=True")
            adapters.add(request.lora_name, request.folder)
        return [
            place if request is None else replace(place, lora=request.lora_name)
            for place, request in zip(places, chosen, strict=True)
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
        places: Sequence[_Place],
    ) -> list[RequestOutput]:
        params = self._match(sampling_params, len(prompts))
        running: dict[str, RunningRequest] = {}
        try:
            for prompt, one, place in zip(prompts, params, places, strict=True):
                request = self._start(prompt, one, place)
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
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise RequestError(f"sampling_params has {len(params)} entries for {count} prompts")
        return list(params)

    def _start(self, prompt: _Prompt, params: SamplingParams, place: _Place) -> RunningRequest:
        if self._tokenizer is None and params.stop:
            raise RequestError("stop strings need a tokenizer: leave skip_tokenizer_init off")
        request_id = str(self._counter)
        self._counter += 1
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        now = time.monotonic()
        grammar = self._compile(params)
        self._engine.add_request(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=tuple(prompt.token_ids),
                params=self._spelled(params),
                grammar=grammar,
                seed=seed,
                arrival=now,
                priority=place.priority,
                deadline=now + place.timeout,
                tenant=place.tenant,
                lora=place.lora,
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


def _places(
    count: int,
    priority: int | Sequence[int],
    tenant: str | Sequence[str],
    timeout: float | Sequence[float] | None,
) -> list[_Place]:
    """Raises RequestError where a list has another length than the prompts."""
    lists: list[list[Any]] = []
    for name, value in (
        ("priority", priority),
        ("tenant", tenant),
        ("timeout", inf if timeout is None else timeout),
    ):
        each = [value] * count if isinstance(value, str | int | float) else list(value)
        if len(each) != count:
            raise RequestError(f"{name} has {len(each)} entries for {count} prompts")
        lists.append(each)
    return [_Place(*values) for values in zip(*lists, strict=True)]


def _conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> Iterable[Sequence[Message]]:
    many: Any = messages if messages and not isinstance(messages[0], Mapping) else [messages]
    return list(many)
