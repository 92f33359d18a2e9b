"""A model with its engine, and the conversion of prompts to the engine's requests."""

import gc
import random
import time
from dataclasses import dataclass, replace
from math import inf

from headrace_common.sampling import params as common
from headrace_common.text.bad_words import with_spelled_bad_words

from ..checkpoints.checkpoint import load_checkpoint
from ..core.compiled_grammar import CompiledGrammar
from ..core.errors import ConfigError, RequestError
from ..core.images import PromptImage
from ..core.request import EngineRequest
from ..core.thinking import ThinkingBudget
from ..engine.engine import Engine
from ..lora.request import LoRARequest
from ..model_runner.model_runner import ModelRunner
from ..scheduler.policies import make_policy
from ..structured_output.compiler import GrammarCompiler
from ..structured_output.thinking_budgets import ThinkingBudgets
from .embeddings import PooledPrompt
from .engine_args import EngineArgs
from .hf_overrides import OverriddenCheckpoint
from .images import ImagePrompts
from .outputs import CompletionOutput, RequestOutput
from .prompts import ReadPrompt
from .request import RunningRequest
from .sampling_params import RequestOutputKind, SamplingParams, as_offline
from .tokenizer import ChatTokenizer

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The fields of a request for the scheduling policy, and its adapter; `timeout` is in seconds.

    Tenants share no prefix cache.
    """

    priority: int = 0
    tenant: str = DEFAULT_TENANT
    timeout: float = inf
    lora: LoRARequest | None = None


class LoadedModel:
    """A loaded model with its engine.

    Its constructor exempts all objects alive from Python's garbage collection (`gc.freeze`).

    Raises ConfigError, CheckpointError or headrace_common's TokenizerError.
    """

    def __init__(self, args: EngineArgs) -> None:
        self.config, self._options = args.read()
        self._checkpoint = load_checkpoint(self.config.model, self.config.revision)
        if self._options.hf_overrides:
            found = self._checkpoint
            if found.is_gguf:
                raise ConfigError(
                    f"hf_overrides changes a config.json, which {found.folder} does not have"
                )
            self._overridden = OverriddenCheckpoint(
                found.folder, found.config, self._options.hf_overrides
            )
            self.config = replace(self.config, model=str(self._overridden.path))
        self.tokenizer = self._load_tokenizer()
        policy = make_policy(self.config.policy, self.config.policy_options)
        self.runner = ModelRunner(self.config)
        self.runner.warm_up()
        self.engine = Engine(self.config, self.runner, policy)
        self._images = ImagePrompts(self._checkpoint, self.tokenizer, self.runner.image_reader)
        self._random = random.Random(self.config.seed)  # noqa: S311  sampling, not secrets
        self._grammars: GrammarCompiler | None = None
        self._thinking: ThinkingBudgets | None = None
        # The number of calls of reset_prefix_cache. Prompts of another epoch are not found.
        self._epoch = 0
        # Objects that exist now stay alive, so the collector need not visit them between steps.
        gc.collect()
        gc.freeze()

    def need_tokenizer(self) -> ChatTokenizer:
        """The tokenizer. Raises ConfigError if there is none."""
        if self.tokenizer is None:
            raise ConfigError("skip_tokenizer_init is set, so there is no tokenizer")
        return self.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults, updated with the checkpoint's generation_config.json."""
        generation = dict(self._options.override_generation_config)
        if self._options.generation_config == "auto":
            generation = {**self._checkpoint.generation_config, **generation}
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        chosen = {name: generation[name] for name in names if generation.get(name) is not None}
        if generation.get("max_new_tokens") is not None:
            chosen["max_tokens"] = generation["max_new_tokens"]
        return SamplingParams(**chosen)

    def forget_prompts(self) -> None:
        """Makes the prefix cache forget the prompts so far."""
        self._epoch += 1

    def prepare(
        self,
        request_id: str,
        prompt: ReadPrompt,
        params: common.SamplingParams,
        options: RequestOptions,
        kind: RequestOutputKind | None = None,
    ) -> tuple[EngineRequest, RunningRequest]:
        """Returns the engine's request, and the object that collects its output.

        Raises RequestError. `kind` replaces the parameters' `output_kind`.
        """
        held = as_offline(params)
        self._check(held)
        salt = self._salt(options.tenant, prompt.cache_salt)
        token_ids, images = self._with_images(prompt, salt, held.truncate_prompt_tokens)
        token_ids = self._cut(token_ids, held)
        now = time.monotonic()
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=tuple(token_ids),
            params=self._spelled(held.for_request()),
            grammar=self._compile(held),
            thinking=self._limit_thinking(held),
            seed=self._random.getrandbits(63) if held.seed is None else held.seed,
            arrival=now,
            priority=options.priority,
            deadline=now + options.timeout,
            tenant=options.tenant,
            cache_salt=salt,
            images=images,
            lora=self._adapt(options.lora),
        )
        choices = [CompletionOutput(index) for index in range(held.n)]
        output = RequestOutput(request_id, prompt.text, token_ids, choices)
        output.lora_request = options.lora
        return request, RunningRequest(output, held, self.tokenizer, kind or held.output_kind)

    def _load_tokenizer(self) -> ChatTokenizer | None:
        options = self._options
        if options.skip_tokenizer_init:
            return None
        source = options.tokenizer or self._checkpoint.folder
        loaded = ChatTokenizer.load(source, options.tokenizer_revision)
        assert isinstance(loaded, ChatTokenizer)
        return loaded

    def _check(self, params: SamplingParams) -> None:
        if self.tokenizer is None and params.stop:
            raise RequestError("stop strings need a tokenizer: leave skip_tokenizer_init off")
        most = self._options.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > most:
                raise RequestError(
                    f"{name} must be at most max_logprobs ({most}), not {getattr(params, name)}"
                )

    def _cut(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        cut = params.truncate_prompt_tokens
        if cut == -1:
            cut = max(1, self.engine.max_model_len - (params.max_tokens or 1))
        return token_ids if cut is None else token_ids[-cut:]

    def pooled_prompt(self, prompt: ReadPrompt, cut: int | None) -> PooledPrompt:
        """A prompt to embed, of which the last `cut` tokens are kept. Raises RequestError."""
        salt = self._salt(DEFAULT_TENANT, prompt.cache_salt)
        token_ids, images = self._with_images(prompt, salt, cut)
        return (token_ids if cut is None else token_ids[-cut:]), images

    def _with_images(
        self, prompt: ReadPrompt, salt: bytes, cut: int | None
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        if prompt.images and cut is not None:
            raise RequestError("truncate_prompt_tokens cannot cut a prompt with images")
        return self._images.expand(prompt.text, prompt.token_ids, prompt.images, salt)

    def _salt(self, tenant: str, salt: str) -> bytes:
        if tenant == DEFAULT_TENANT and not self._epoch:
            return salt.encode()
        # UTF-8 text never contains this first byte.
        return b"\xff" + repr((self._epoch, tenant, salt)).encode()

    def _adapt(self, request: LoRARequest | None) -> str | None:
        """The adapter's name, after its registration with the runner."""
        if request is None:
            return None
        if self.runner.adapters is None:
            raise RequestError("lora_request needs an LLM that was made with enable_lora=True")
        self.runner.adapters.add(request.lora_name, request.folder)
        return request.lora_name

    def _compile(self, params: SamplingParams) -> CompiledGrammar | None:
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            runner = self.runner
            self._grammars = GrammarCompiler(
                self.need_tokenizer(), runner.vocab_size, runner.eos_token_ids
            )
        return self._grammars.compile(params.structured_outputs)

    def _limit_thinking(self, params: SamplingParams) -> ThinkingBudget | None:
        if params.thinking_token_budget is None:
            return None
        if self._thinking is None:
            self._thinking = ThinkingBudgets(self.need_tokenizer())
        return self._thinking.make(params)

    def _spelled(self, params: common.SamplingParams) -> common.SamplingParams:
        if not params.bad_words:
            return params
        return with_spelled_bad_words(params, self.need_tokenizer())
