"""vLLM's offline API besides `generate`: the supported part, and refusals of the rest by name."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

import headrace_engine
from headrace_common.sampling.params import SamplingError
from headrace_engine import (
    LLM,
    AsyncLLM,
    EngineArgs,
    FlexibleArgumentParser,
    LLMEngine,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TokensPrompt,
)
from headrace_engine.core.errors import ConfigError, EngineError, RequestError
from headrace_engine.offline.arguments import UNSUPPORTED_METHODS, VLLM_ARGUMENTS, Fixed, Ignored
from headrace_engine.offline.prompts import UNSUPPORTED_PROMPT
from headrace_engine.offline.sampling_params import UNSUPPORTED_SAMPLING
from headrace_testing import vllm_examples
from headrace_testing.embedders import save_embedder
from headrace_testing.pages import offline

OPTIONS: dict[str, Any] = {"dtype": "float", "device": "cpu", "num_blocks": 256, "threads": 1}
IDS = list(range(20, 60))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(model="headrace-demo", **OPTIONS)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_embedder(tmp_path_factory.mktemp("embedder"), "qwen3", "lasttoken")
    return LLM(str(folder), runner="pooling", **OPTIONS)


def greedy(**options: Any) -> SamplingParams:
    defaults: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8}
    return SamplingParams(**{**defaults, **options})


def args(**options: Any) -> EngineArgs:
    return EngineArgs(**OPTIONS, **options)


# Refusals


@pytest.mark.parametrize("name", UNSUPPORTED_PROMPT)
def test_fields_of_a_prompt_are_never_dropped(name: str, llm: LLM) -> None:
    prompt: Any = {"prompt": "What is it?", name: {"image": object()}}
    with pytest.raises(RequestError, match=f"^{name}: "):
        llm.generate([prompt], use_tqdm=False)


def test_parts_of_a_message_that_are_neither_text_nor_image_are_refused(llm: LLM) -> None:
    audio = {"type": "input_audio", "input_audio": {"data": "x"}}
    text = {"type": "text", "text": "Hello"}
    with pytest.raises(RequestError, match="a part of type 'input_audio' is not supported"):
        llm.chat([{"role": "user", "content": [text, audio]}])
    (found,) = llm.chat([{"role": "user", "content": [text, text]}], greedy(), use_tqdm=False)
    assert "Hello\nHello" in str(found.prompt)


@pytest.mark.parametrize("name", UNSUPPORTED_METHODS)
def test_missing_methods_name_a_replacement(name: str, llm: LLM) -> None:
    with pytest.raises(AttributeError, match=f"LLM.{name} is not supported: "):
        getattr(llm, name)


@pytest.mark.parametrize("name", UNSUPPORTED_SAMPLING)
def test_unsupported_sampling_parameters_name_a_replacement(name: str) -> None:
    given: dict[str, Any] = {name: [len]}
    with pytest.raises(SamplingError, match=f"{name}: is not supported: "):
        SamplingParams(**given)


@pytest.mark.parametrize("name", VLLM_ARGUMENTS)
def test_each_argument_of_vllm_is_accepted_or_refused_by_name(name: str) -> None:
    match VLLM_ARGUMENTS[name]:
        case Fixed(accepted, remedy):
            for value in accepted:
                EngineArgs(**{name: value})
            with pytest.raises(ConfigError) as caught:
                EngineArgs(**{name: "another"})
            assert str(caught.value) == f"{name}='another' is not supported: {remedy}"
        case Ignored():
            given: dict[str, Any] = {name: object()}
            EngineArgs(**given)


def test_a_typing_mistake_is_pointed_out() -> None:
    with pytest.raises(ConfigError, match="max_modl_len; did you mean max_model_len"):
        EngineArgs(max_modl_len=9)


def test_pages_agree_with_the_tables() -> None:
    for module in (offline, vllm_examples):
        assert module.PAGE.read_text() == module.page(), f"run python -m {module.__name__}"


def test_every_public_name_exists() -> None:
    for name in headrace_engine.__all__:
        assert getattr(headrace_engine, name) is not None


# Arguments


def test_values_and_names_of_vllm() -> None:
    config, _ = EngineArgs(
        dtype="half",
        gpu_memory_utilization=0.5,
        runner="pooling",
        quantization=None,
        seed=None,
        load_format="safetensors",
        scheduling_policy="priority",
    ).read()
    assert (config.dtype, config.memory_utilization, config.task) == ("float16", 0.5, "embed")
    assert (config.quantization, config.seed, config.load_format) == ("none", 0, "auto")
    assert config.policy == "priority"


def test_arguments_from_a_command_line() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.set_defaults(runner="pooling", enforce_eager=True)
    given = '--max_model_len 1K --no-enable-prefix-caching --pooler-config {"normalize":false}'
    parsed = parser.parse_args([*given.split(), "--gpu-memory-utilization=0.3"])

    config, _ = EngineArgs.from_cli_args(Namespace(**vars(parsed), other=1)).read()
    same, _ = EngineArgs(**vars(parsed)).read()

    assert config == same
    assert (config.max_model_len, config.enable_prefix_caching) == (1024, False)
    assert (config.memory_utilization, config.task, config.enforce_eager) == (0.3, "embed", True)
    assert config.pooler_config == {"normalize": False}


def test_fields_of_config_json_are_overridden() -> None:
    overrides = {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    plain = LLM("headrace-demo", **OPTIONS)
    changed = LLM("headrace-demo", hf_overrides=overrides, **OPTIONS)

    told, told_otherwise = (
        one.generate("What is Headrace?", greedy(logprobs=0), False)[0].outputs[0]
        for one in (plain, changed)
    )

    assert told.cumulative_logprob != told_otherwise.cumulative_logprob


def test_defaults_of_generation() -> None:
    generation_overrides = {"temperature": 0.3, "max_new_tokens": 5}
    llm = LLM(
        "headrace-demo",
        generation_config="vllm",
        override_generation_config=generation_overrides,
        **OPTIONS,
    )

    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.3, max_tokens=5)


# Sampling parameters


def test_sampling_parameters_change_and_stay_checked() -> None:
    empty: dict[str, Any] = dict.fromkeys(("stop", "logit_bias", "bad_words", "stop_token_ids"))
    params = SamplingParams(**empty, seed=-1)
    other = params.clone()
    changes: dict[str, Any] = {"max_tokens": 3, "stop": "x"}
    for name, value in changes.items():
        setattr(params, name, value)

    assert (params.max_tokens, params.stop, params.seed) == (3, ("x",), None)
    assert other == SamplingParams()
    with pytest.raises(SamplingError, match="top_p"):
        params.top_p = 2.0  # type: ignore[misc]
    assert params.top_p == 1.0


def test_the_older_name_of_structured_outputs(llm: LLM) -> None:
    choice = StructuredOutputsParams(choice=["yes", "no"])
    (found,) = llm.generate("Is it?", greedy(guided_decoding=choice), False)
    assert found.outputs[0].text in ("yes", "no")
    with pytest.raises(SamplingError, match="give only one"):
        SamplingParams(guided_decoding=choice, structured_outputs=choice)
    with pytest.raises(SamplingError, match="must be StructuredOutputsParams, not 'yes'"):
        SamplingParams(guided_decoding="yes")  # type: ignore[arg-type]


def test_prompts_are_cut_at_their_beginning(llm: LLM) -> None:
    prompt = TokensPrompt(prompt_token_ids=IDS)
    (found,) = llm.generate(prompt, greedy(truncate_prompt_tokens=5), False)
    assert found.prompt_token_ids == IDS[-5:]
    long = TokensPrompt(prompt_token_ids=[7] * 3000)
    (found,) = llm.generate(long, greedy(truncate_prompt_tokens=-1), False)
    assert len(found.prompt_token_ids) == 2048 - 8
    assert len(found.outputs[0].token_ids) == 8


def test_outputs_without_text(llm: LLM) -> None:
    (found,) = llm.generate("Hello", greedy(detokenize=False), False)
    assert (found.outputs[0].text, len(found.outputs[0].token_ids)) == ("", 8)
    with pytest.raises(SamplingError, match="leave detokenize on"):
        SamplingParams(detokenize=False, stop=["x"])


def test_an_llm_may_allow_fewer_log_probabilities() -> None:
    llm = LLM("headrace-demo", max_logprobs=2, **OPTIONS)
    with pytest.raises(RequestError, match=r"logprobs must be at most max_logprobs \(2\), not 3"):
        llm.generate("Hello", greedy(logprobs=3), False)


# Outputs, tenants, the tokenizer


def test_outputs_have_their_times(llm: LLM) -> None:
    metrics = llm.generate("Hello", greedy(n=2, temperature=1.0), False)[0].metrics
    assert metrics is not None and metrics.num_generation_tokens == 16
    assert metrics.first_token_time is not None and metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time


def test_prefix_caches_are_separated_by_tenant_salt_and_reset(llm: LLM) -> None:
    def cached(tenant: str = "default", **salt: Any) -> int:
        prompt: Any = {"prompt_token_ids": [77, *IDS], **salt}
        return llm.generate(prompt, greedy(), False, tenant=tenant)[0].num_cached_tokens

    assert [cached(), cached()] == [0, 32]
    assert [cached("a"), cached("a"), cached("b")] == [0, 32, 0]
    assert [cached(cache_salt="s"), cached(cache_salt="s"), cached("a", cache_salt="s")] == [
        0,
        32,
        0,
    ]
    assert llm.reset_prefix_cache()
    assert [cached(), cached(), cached("a")] == [0, 32, 0]


def test_statistics_have_vllms_names(llm: LLM) -> None:
    llm.generate("Hello", greedy(), False)
    found = {metric.name: metric for metric in llm.get_metrics()}
    queries = found["vllm:prefix_cache_queries"]
    assert isinstance(queries, headrace_engine.Counter) and queries.value > 0
    assert isinstance(found["vllm:num_requests_running"], headrace_engine.Gauge)


def test_the_tokenizer_renders_chats(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    chat = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)

    assert ids == tokenizer.encode(str(text))
    assert text == llm.chat(chat, greedy(), False)[0].prompt
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_a_profile_is_written(llm: LLM, tmp_path: Path) -> None:
    llm.start_profile(str(tmp_path))
    llm.generate("Hello", greedy(max_tokens=1), False)
    llm.stop_profile()
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"]


# Embeddings


def test_scores_are_cosines(embedder: LLM) -> None:
    texts = ["the cat", "the dog sat", "the cat"]
    vectors = [one.outputs.embedding for one in embedder.embed(texts, use_tqdm=False)]
    expected = [sum(a * b for a, b in zip(vectors[0], other, strict=True)) for other in vectors]

    scores = [one.outputs.score for one in embedder.score("the cat", texts, use_tqdm=False)]

    assert scores == pytest.approx(expected, abs=1e-5) and scores[2] == pytest.approx(1.0)
    with pytest.raises(RequestError, match="text_1 has 2 texts for 3"):
        embedder.score(["a", "b"], texts)


def test_encode_gives_tensors(embedder: LLM) -> None:
    (found,) = embedder.encode("the cat", use_tqdm=False)
    (same,) = embedder.embed("the cat", use_tqdm=False)
    assert found.outputs.data.tolist() == pytest.approx(same.outputs.embedding)
    with pytest.raises(RequestError, match="pooling_task 'classify' is not supported"):
        embedder.encode("the cat", pooling_task="classify")


# Engines whose steps the tests observe


def drain(engine: LLMEngine) -> dict[str, list[headrace_engine.RequestOutput]]:
    found: dict[str, list[headrace_engine.RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    return found


def test_each_kind_of_output(llm: LLM) -> None:
    engine = LLMEngine.from_engine_args(args())
    options: dict[str, Any] = {"logprobs": 1, "n": 2, "seed": 3, "temperature": 1.0}
    for kind in RequestOutputKind:
        engine.add_request(kind.name, "What is Headrace?", greedy(output_kind=kind, **options))

    found = drain(engine)

    (final,) = found["FINAL_ONLY"]
    last = found["CUMULATIVE"][-1]
    assert last.outputs == final.outputs and last.finished
    lengths = [len(one.outputs[0].token_ids) for one in found["CUMULATIVE"]]
    assert lengths == sorted(lengths) and len(set(lengths)) > 2
    for choice in final.outputs:
        parts = [
            part
            for output in found["DELTA"]
            for part in output.outputs
            if part.index == choice.index
        ]
        assert [token for part in parts for token in part.token_ids] == choice.token_ids
        assert "".join(part.text for part in parts) == choice.text
        assert [one for part in parts for one in part.logprobs or []] == choice.logprobs
    assert [output.finished for output in found["DELTA"]].count(True) == 1


def test_aborted_requests_are_gone() -> None:
    engine = LLMEngine(args())
    engine.add_request("a", "Hello", greedy())
    engine.add_request("b", "Hello", greedy())
    with pytest.raises(RequestError, match="request_id 'a' is running"):
        engine.add_request("a", "Hello", greedy())
    engine.step()
    engine.abort_request(["a", "unknown"])

    assert engine.get_num_unfinished_requests() == 1
    assert set(drain(engine)) == {"b"}


async def collect(engine: AsyncLLM, name: str, **options: Any) -> str:
    params = greedy(output_kind=RequestOutputKind.DELTA, **options)
    return "".join(
        [output.outputs[0].text async for output in engine.generate("Hello", params, name)]
    )


async def test_coroutines_stream_together(llm: LLM) -> None:
    import asyncio

    expected = llm.generate("Hello", greedy(max_tokens=30), False)[0].outputs[0].text
    engine = AsyncLLM.from_engine_args(args())
    try:
        texts = await asyncio.gather(
            *(collect(engine, str(number), max_tokens=30) for number in range(4))
        )
        assert texts == [expected] * 4
        stopped = await collect(engine, "stop", max_tokens=30, stop=[expected[5:9]])
        assert stopped == expected[: expected.index(expected[5:9])]
        with pytest.raises(RequestError, match="prompt_token_ids has"):
            await anext(
                engine.generate(TokensPrompt(prompt_token_ids=[5] * 4000), greedy(), "long")
            )
        left = engine.generate("Hello", greedy(max_tokens=500), "left")
        await anext(left)
        await left.aclose()
        assert await collect(engine, "left", max_tokens=30) == expected
    finally:
        engine.shutdown()
    with pytest.raises(EngineError, match="the engine has ended"):
        await collect(engine, "late")
