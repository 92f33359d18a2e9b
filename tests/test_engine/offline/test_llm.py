"""The offline API with a real tiny model: prompt forms, outputs, stops, chat, progress, errors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headrace_engine
from headrace_common.text.tokenizer import Tokenizer
from headrace_engine import LLM, SamplingParams
from headrace_engine.core.errors import ConfigError, RequestError
from headrace_testing.checkpoints import Reference

CheckpointMaker = Callable[[str], Path]
ReferenceMaker = Callable[[str], Reference]

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_blocks": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ' ' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant{% endif %}"
)


@pytest.fixture(scope="module")
def llm(checkpoint: CheckpointMaker) -> LLM:
    return LLM(str(checkpoint("llama")), **OPTIONS)


@pytest.fixture(scope="module")
def tokenizer(llm: LLM) -> Tokenizer:
    return llm.get_tokenizer()


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, **{"max_tokens": 10, **options})


def test_every_form_of_prompt_gives_the_same_tokens(
    llm: LLM, tokenizer: Tokenizer, reference: ReferenceMaker
) -> None:
    text = "the cat sat on the mat"
    ids = tokenizer.encode(text)
    path = reference("llama").path(tuple(ids), 10)
    assert path.margin > 1e-3
    forms: list[Any] = [text, {"prompt": text}, {"prompt_token_ids": ids}]
    outputs = [llm.generate(form, greedy(), use_tqdm=False)[0] for form in forms]
    outputs += llm.generate(forms, greedy(), use_tqdm=False)
    for output in outputs:
        assert output.finished and output.prompt_token_ids == ids
        choice = output.outputs[0]
        assert (choice.index, choice.token_ids) == (0, list(path.output))
        assert choice.text == tokenizer.decode([*ids, *path.output])[len(text) :]
        assert (choice.finish_reason, choice.stop_reason) == ("length", None)
        assert choice.logprobs is None and choice.cumulative_logprob is None
    assert [output.prompt for output in outputs[:3]] == [text, text, None]
    assert len({output.request_id for output in outputs}) == len(outputs)


def test_outputs_keep_the_order_of_the_prompts(llm: LLM) -> None:
    prompts: list[Any] = [{"prompt_token_ids": [5 + index]} for index in range(20)]
    params = [greedy(max_tokens=1 + index % 7) for index in range(20)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [[5 + index] for index in range(20)]
    assert [len(one.outputs[0].token_ids) for one in outputs] == [1 + i % 7 for i in range(20)]


def test_choices_and_seeds(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=11, max_tokens=12, ignore_eos=True)
    first, second = (llm.generate("one two", params, use_tqdm=False)[0] for _ in range(2))
    assert [choice.index for choice in first.outputs] == [0, 1, 2]
    assert len({tuple(choice.token_ids) for choice in first.outputs}) == 3
    assert [one.token_ids for one in first.outputs] == [one.token_ids for one in second.outputs]
    free = SamplingParams(max_tokens=12, ignore_eos=True)
    third, fourth = (llm.generate("one two", free, use_tqdm=False)[0] for _ in range(2))
    assert third.outputs[0].token_ids != fourth.outputs[0].token_ids


def test_stop_strings_end_a_choice(llm: LLM) -> None:
    whole = llm.generate("the cat", greedy(max_tokens=30), use_tqdm=False)[0].outputs[0]
    stop = whole.text[8:11]
    cut = whole.text.index(stop)
    choice = llm.generate("the cat", greedy(max_tokens=30, stop=[stop]), use_tqdm=False)[0].outputs[
        0
    ]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (
        whole.text[:cut],
        "stop",
        stop,
    )
    assert choice.token_ids == whole.token_ids[: len(choice.token_ids)]
    kept = greedy(max_tokens=30, stop=[stop], include_stop_str_in_output=True)
    choice = llm.generate("the cat", kept, use_tqdm=False)[0].outputs[0]
    assert choice.text == whole.text[: cut + len(stop)]


def test_stop_tokens_and_the_end_of_sequence(llm: LLM, tokenizer: Tokenizer) -> None:
    whole = llm.generate("the cat", greedy(), use_tqdm=False)[0].outputs[0].token_ids
    stopped = greedy(stop_token_ids=[whole[4]])
    choice = llm.generate("the cat", stopped, use_tqdm=False)[0].outputs[0]
    first = whole.index(whole[4])
    assert (choice.finish_reason, choice.stop_reason) == ("stop", whole[4])
    assert choice.token_ids == whole[: first + 1]
    ended = SamplingParams(temperature=0.0, max_tokens=9, logit_bias={2: 100.0})
    choice = llm.generate("the cat", ended, use_tqdm=False)[0].outputs[0]
    assert (choice.token_ids, choice.text) == ([2], "")
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)


def test_log_probabilities(llm: LLM, tokenizer: Tokenizer) -> None:
    choice = llm.generate("the cat", greedy(logprobs=2), use_tqdm=False)[0].outputs[0]
    assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids)
    for token, position in zip(choice.token_ids, choice.logprobs, strict=True):
        assert list(position)[0] == token and len(position) == 2
        assert position[token].rank == 1
        assert position[token].decoded_token == tokenizer.decode([token])
    total = sum(
        one[token].logprob for token, one in zip(choice.token_ids, choice.logprobs, strict=True)
    )
    assert choice.cumulative_logprob == pytest.approx(total)


def test_prompts_that_share_a_beginning_share_the_cache(llm: LLM) -> None:
    ids = list(range(100, 164))
    for expected in (0, 48):
        output = llm.generate({"prompt_token_ids": ids}, greedy(), use_tqdm=False)[0]
        assert output.num_cached_tokens == expected


def test_chat_renders_the_template(llm: LLM, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "the moon"}]
    options: dict[str, Any] = {"use_tqdm": False, "chat_template": TEMPLATE}
    output = llm.chat(messages, greedy(), **options)[0]
    rendered = "<s>user the moon<s>assistant"
    assert output.prompt == rendered
    assert output.prompt_token_ids == tokenizer.encode(rendered)
    several = llm.chat([messages, messages], greedy(), **options)
    assert [one.outputs[0].token_ids for one in several] == [output.outputs[0].token_ids] * 2


def test_chat_without_a_template_is_refused(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="has no chat template"):
        llm.chat([{"role": "user", "content": "x"}])


def test_defaults_come_from_the_checkpoint(checkpoint: CheckpointMaker, tmp_path: Path) -> None:
    import json
    import shutil

    folder = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    settings = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 7}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    llm = LLM(str(folder), skip_tokenizer_init=True, **OPTIONS)
    expected = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, max_tokens=7)
    assert llm.get_default_sampling_params() == expected
    output = llm.generate({"prompt_token_ids": [4, 5]}, use_tqdm=False)[0].outputs[0]
    assert (len(output.token_ids), output.text) == (7, "")
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        llm.generate("text", use_tqdm=False)
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        llm.generate({"prompt_token_ids": [4]}, SamplingParams(stop=["x"]), use_tqdm=False)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([{"prompt_token_ids": [4]}, {"prompt_token_ids": []}], "is empty"),
        ([{"prompt_token_ids": [4]}, {"prompt_token_ids": [999]}], "token id 999"),
        ([{"prompt_token_ids": [4] * 600}], "600 tokens"),
        ([7], "a prompt must be"),
        ([{"text": "x"}], "a prompt must be"),
    ],
)
def test_a_prompt_that_cannot_run_leaves_no_data(
    prompts: list[Any], message: str, llm: LLM
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, greedy(), use_tqdm=False)
    assert llm.generate([], greedy(), use_tqdm=False) == []
    assert llm.generate("one", greedy(), use_tqdm=False)[0].finished


def test_parameters_must_match_the_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 entries for 1 prompts"):
        llm.generate(["a"], [greedy(), greedy()])


def test_progress_is_shown(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["one", "two"], greedy())
    shown = capsys.readouterr().err
    assert "Processed prompts" in shown and "2/2" in shown and "tok/s" in shown


def test_unknown_options_are_refused(checkpoint: CheckpointMaker) -> None:
    with pytest.raises(ConfigError, match="unknown option colour; known are"):
        LLM(str(checkpoint("llama")), colour=2)


def test_vllms_name_of_the_memory_share_is_known(checkpoint: CheckpointMaker) -> None:
    with pytest.raises(ConfigError, match="memory_utilization must be in"):
        LLM(str(checkpoint("llama")), gpu_memory_utilization=2.0)


def test_importing_the_package_imports_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, headrace_engine; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = headrace_engine.Nothing
