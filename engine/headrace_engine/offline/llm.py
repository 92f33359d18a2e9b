"""The offline API: `LLM(model).generate(prompts, SamplingParams(...))`, with vLLM's names.

Runs the engine in the caller's thread until all prompts are finished, without queue or server.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from headrace_common.sampling import params as common
from headrace_common.sampling.pooling import PoolingParams

from ..core.errors import ConfigError, RequestError
from ..lora.request import LoRARequest
from .arguments import UNSUPPORTED_METHODS
from .beams import BeamSearchOutput, BeamSearchParams, beam_output
from .embeddings import (
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
    embed,
    pooled,
    scored,
)
from .engine_args import EngineArgs
from .llm_engine import LLMEngine
from .loaded_model import DEFAULT_TENANT, RequestOptions
from .media import Media, Video, read_fps, read_parts, written
from .metrics import Metric, metrics_of
from .outputs import RequestOutput
from .prompts import Prompt as Prompt
from .prompts import ReadPrompt, listed, read_prompt
from .prompts import TextPrompt as TextPrompt
from .prompts import TokensPrompt as TokensPrompt
from .sampling_params import RequestOutputKind, SamplingParams
from .tokenizer import ChatTokenizer
from .torch_profile import Profile

Message = Mapping[str, Any]
# One adapter for all prompts, or one for each.
AdapterChoice = LoRARequest | Sequence[LoRARequest | None] | None
# Whether to show a progress bar, or a function that makes one.
Progress = bool | Callable[..., Any]


class LLM:
    """A model, loaded once and used for any number of calls, by one thread at a time.

    Its constructor exempts all objects alive from Python's garbage collection (`gc.freeze`).

    `options` are fields of EngineConfig and OfflineOptions; vLLM's other names are in `arguments`.

    Raises ConfigError, CheckpointError or headrace_common's TokenizerError.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.llm_engine = LLMEngine(EngineArgs(model, **options))
        self._model = self.llm_engine.model
        self._counter = 0
        self._profile: Profile | None = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            remedy = UNSUPPORTED_METHODS.get(name, "see docs/offline-api.md")
            raise AttributeError(f"LLM.{name} is not supported: {remedy}")

    def get_tokenizer(self) -> ChatTokenizer:
        """The tokenizer. Raises ConfigError if the LLM was made without one."""
        return self._model.need_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults, updated with the checkpoint's generation_config.json."""
        return self._model.default_sampling_params()

    def get_metrics(self) -> list[Metric]:
        """The engine's present statistics, under vLLM's names."""
        return metrics_of(self._model.engine.stats(), self._model.config.model)

    def reset_prefix_cache(self) -> bool:
        """Makes the prefix cache forget the prompts so far."""
        self._model.forget_prompts()
        return True

    def start_profile(self, folder: str | None = None) -> None:
        """Records what torch does until `stop_profile`.

        The trace goes into `folder`, or by default into the one that VLLM_TORCH_PROFILER_DIR names.
        Raises ConfigError if neither is given.
        """
        chosen = folder or os.environ.get("VLLM_TORCH_PROFILER_DIR")
        if chosen is None:
            raise ConfigError("start_profile needs a folder for its trace: pass one")
        self._profile = Profile(Path(chosen))

    def stop_profile(self) -> None:
        """Writes the trace, for chrome://tracing or Perfetto."""
        if self._profile is not None:
            self._profile.write()
            self._profile = None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: common.SamplingParams | Sequence[common.SamplingParams] | None = None,
        use_tqdm: Progress = True,
        *,
        priority: int | Sequence[int] | None = None,
        tenant: str | Sequence[str] = DEFAULT_TENANT,
        timeout: float | Sequence[float] | None = None,
        lora_request: AdapterChoice = None,
    ) -> list[RequestOutput]:
        """Generates an output for each prompt, in the prompts' order.

        Each parameter (but `use_tqdm`) is one value for all prompts or a list with one for each.
        The scheduling policy uses `priority` (lower is sooner), `tenant` and `timeout` (seconds).
        Tenants share no cached prompts. `lora_request` is the adapter to run with. Raises
        RequestError before anything runs if the engine cannot run a prompt, and CheckpointError or
        ConfigError for an adapter.
        """
        given = [read_prompt(prompt, self._model.tokenizer) for prompt in listed(prompts)]
        options = _request_options(len(given), priority, tenant, timeout, lora_request)
        return self._run(given, sampling_params, use_tqdm, options)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: common.SamplingParams | Sequence[common.SamplingParams] | None = None,
        use_tqdm: Progress = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: AdapterChoice = None,
        media_io_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, through the checkpoint's chat template.

        `chat_template` is the text of another template. Contents are texts or lists of parts: text,
        `image_url` (a data: URL), `image_pil`, and `video_url` (frames in a data: URL).
        `media_io_kwargs` {"video": {"fps": 2}} says how many frames are a second. Raises
        ConfigError if there is no template, RequestError for other parts.
        """
        tokenizer, fps = self.get_tokenizer(), read_fps(media_io_kwargs)
        read = [read_parts(conversation, fps) for conversation in _conversations(messages)]

        def encode(conversation: Sequence[Message], media: Sequence[Media]) -> list[int]:
            return tokenizer.chat_ids(
                conversation,
                chat_template,
                videos=[each.counted for each in media if isinstance(each, Video)],
                tools=tools,
                variables=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )

        prompts = [written(partial(encode, *each)) for each in read]
        given = [
            ReadPrompt(tokenizer.decode(ids, skip_special_tokens=False), ids, images=images)
            for ids, (_, images) in zip(prompts, read, strict=True)
        ]
        options = _request_options(len(given), None, DEFAULT_TENANT, None, lora_request)
        return self._run(given, sampling_params, use_tqdm, options)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: Progress = True,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embeds each prompt with an embedding model (see `task`).

        `truncate_prompt_tokens` k keeps the last k tokens, -1 as many as the model takes. Raises
        RequestError.
        """
        if self._of_tokens:
            raise RequestError("this model makes a vector for each token: use encode")
        return self._embed(prompts, pooling_params, use_tqdm, truncate_prompt_tokens)

    def _embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None,
        use_tqdm: Progress,
        cut: int | None,
    ) -> list[EmbeddingRequestOutput]:
        if cut == -1:
            cut = self._model.engine.max_model_len
        read = [read_prompt(prompt, self._model.tokenizer) for prompt in listed(prompts)]
        given = [self._model.pooled_prompt(each, cut) for each in read]
        shown = bool(use_tqdm)
        return embed(self._model.engine, given, pooling_params or PoolingParams(), use_tqdm=shown)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        use_tqdm: Progress = True,
        *,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """Like `embed`, but each output's `data` is a tensor; of models of late interaction
        [tokens, size]. Raises RequestError."""
        task = "token_embed" if self._of_tokens else "embed"
        if pooling_task not in (None, task):
            raise RequestError(f"pooling_task {pooling_task!r:.60} is not supported: use {task}")
        found = self._embed(prompts, pooling_params, use_tqdm, None)
        return pooled(found, of_tokens=self._of_tokens)

    @property
    def _of_tokens(self) -> bool:
        config = self._model.runner.pooler_config
        return config is not None and config.of_tokens

    def score(
        self,
        text_1: Prompt | Sequence[Prompt],
        text_2: Prompt | Sequence[Prompt],
        use_tqdm: Progress = True,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """The similarity of pairs: the cosine of their embeddings by an embedding model. Models of
        late interaction sum, over the vectors of `text_1`, the largest product with one of the
        other's.

        `text_1` is one text for all of `text_2`, or a list with one for each. Raises RequestError.
        """
        first, second = listed(text_1), listed(text_2)
        if len(first) not in (1, len(second)):
            raise RequestError(
                f"text_1 has {len(first)} texts for {len(second)} of text_2: give one, or one for "
                "each"
            )
        vectors = self._embed([*first, *second], None, use_tqdm, truncate_prompt_tokens)
        left = vectors[: len(first)] * (len(second) // len(first))
        return scored(left, vectors[len(first) :], of_tokens=self._of_tokens)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: Progress = False,
        lora_request: AdapterChoice = None,
    ) -> list[BeamSearchOutput]:
        """The best beams of each prompt, as transformers' `generate(num_beams=...)` finds them.

        Raises RequestError if the beams cannot run at once: see BeamSearchParams.
        """
        outputs = self.generate(prompts, params.sampling(), use_tqdm, lora_request=lora_request)
        return [beam_output(output, params) for output in outputs]

    def _run(
        self,
        prompts: Sequence[ReadPrompt],
        sampling_params: common.SamplingParams | Sequence[common.SamplingParams] | None,
        use_tqdm: Progress,
        options: Sequence[RequestOptions],
    ) -> list[RequestOutput]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _for_each("sampling_params", sampling_params, len(prompts), common.SamplingParams)
        names: list[str] = []
        found: dict[str, RequestOutput] = {}
        try:
            for prompt, one, each in zip(prompts, params, options, strict=True):
                names.append(str(self._counter))
                self._counter += 1
                self.llm_engine.add(names[-1], prompt, one, each, RequestOutputKind.FINAL_ONLY)
            with _ProgressBar(len(names), use_tqdm) as progress:
                while self.llm_engine.has_unfinished_requests():
                    for output in self.llm_engine.step():
                        found[output.request_id] = output
                        progress.finished(output)
        finally:
            self.llm_engine.abort_request(name for name in names if name not in found)
        return [found[name] for name in names]


class _ProgressBar:
    """vLLM's progress bar: finished prompts, with the speed of input and output tokens."""

    def __init__(self, total: int, shown: Progress) -> None:
        make = tqdm if isinstance(shown, bool) else shown
        self._bar: Any = make(
            total=total, desc="Processed prompts", dynamic_ncols=True, disable=not shown
        )
        self._input = self._output = 0

    def __enter__(self) -> "_ProgressBar":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def finished(self, output: RequestOutput) -> None:
        self._input += len(output.prompt_token_ids)
        self._output += sum(len(choice.token_ids) for choice in output.outputs)
        if not self._bar.disable:
            elapsed = max(1e-9, float(self._bar.format_dict["elapsed"]))
            speeds = (total / elapsed for total in (self._input, self._output))
            self._bar.set_postfix_str("input {:.1f} tok/s, output {:.1f} tok/s".format(*speeds))
        self._bar.update()


def _request_options(
    count: int,
    priority: int | Sequence[int] | None,
    tenant: str | Sequence[str],
    timeout: float | Sequence[float] | None,
    lora_request: AdapterChoice,
) -> list[RequestOptions]:
    """One set of options for each prompt. Raises RequestError for a list of another length."""
    lists = (
        _for_each("priority", 0 if priority is None else priority, count, int),
        _for_each("tenant", tenant, count, str),
        _for_each("timeout", inf if timeout is None else timeout, count, int | float),
        _for_each("lora_request", lora_request, count, LoRARequest | None),
    )
    return [RequestOptions(*values) for values in zip(*lists, strict=True)]


def _for_each(name: str, value: Any, count: int, single: Any) -> list[Any]:
    """`count` times `value` if its type is `single`; otherwise `value` as a list."""
    each = [value] * count if isinstance(value, single) else list(value)
    if len(each) != count:
        raise RequestError(
            f"{name} has {len(each)} entries for {count} prompts: give one value, or one for each"
        )
    return each


def _conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> Iterable[Sequence[Message]]:
    many: Any = messages if messages and not isinstance(messages[0], Mapping) else [messages]
    return list(many)
