"""The bundled demo model: it is small, loads with standard tools and writes readable answers."""

import json
import operator
import random
import re

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from dialogues import generate, probes
from exercises import sums
from headrace_common.text.checkpoint import demo_folder
from headrace_engine import LLM, SamplingParams
from review import Talker

FOLDER = demo_folder()
LIMIT_BYTES = 9_500_000
ANSWERS = (
    ("What is 7 + 8?", "7 + 8 = 15."),
    ("Count to 5.", "1, 2, 3, 4, 5."),
    ("What is the capital of France?", "The capital of France is Paris."),
    ("Which licence does Headrace have?", "Headrace is open source under the Apache License 2.0."),
)
_SUM = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)\.")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@pytest.fixture(scope="module")
def talker() -> Talker:
    torch.set_num_threads(1)
    return Talker(FOLDER)


def test_the_files_are_small() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= LIMIT_BYTES


def test_the_configuration_loads_in_transformers() -> None:
    config = AutoConfig.from_pretrained(FOLDER)
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.dtype == torch.bfloat16
    assert config.max_position_embeddings == 2048


def test_eos_token_ids_are_the_special_tokens_that_end_a_reply() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    settings = json.loads((FOLDER / "generation_config.json").read_text())
    assert settings["eos_token_id"] == tokenizer.convert_tokens_to_ids(
        ["<|im_end|>", "<|endoftext|>"]
    )
    assert tokenizer.decode(settings["eos_token_id"], skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    "text", ["Straße 東京 🙂", "a\u0000b\n\n\t  c", "".join(map(chr, range(1, 900)))]
)
def test_every_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_marks_the_roles() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello!"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_training_text_depends_on_the_seed_alone() -> None:
    assert list(generate(200, seed=3)) == list(generate(200, seed=3))
    assert list(generate(200, seed=3)) != list(generate(200, seed=4))


def test_held_out_prompts_are_not_in_the_training_text() -> None:
    held_out = {probe.prompt.lower() for probe in probes(10, seed=1)}
    trained = {turn.prompt.lower() for text in generate(3000, seed=5) for turn in text.turns}
    assert not held_out & trained


def test_sums_in_the_training_text_are_right() -> None:
    rng = random.Random(1)
    found = [_SUM.fullmatch(sums(rng)[0].reply) for _ in range(2000)]
    worked = [match for match in found if match]
    assert len(worked) > 1000
    for match in worked:
        a, b, result = int(match[1]), int(match[3]), int(match[4])
        assert result * b == a if match[2] == "/" else result == _OPERATORS[match[2]](a, b)


@pytest.mark.parametrize(("prompt", "reply"), ANSWERS)
def test_the_model_answers_and_ends_its_reply(talker: Talker, prompt: str, reply: str) -> None:
    assert talker.replies([[{"role": "user", "content": prompt}]]) == [reply]


def test_the_model_remembers_earlier_turns(talker: Talker) -> None:
    chat = [
        {"role": "user", "content": "My name is Emma."},
        {"role": "assistant", "content": "Nice to meet you, Emma! How can I help you?"},
        {"role": "user", "content": "What is my name?"},
    ]
    assert talker.replies([chat]) == ["Your name is Emma."]


def test_the_offline_api_loads_the_demo_model_by_its_name() -> None:
    llm = LLM("headrace-demo", skip_tokenizer_init=True, num_blocks=8)

    (output,) = llm.generate([{"prompt_token_ids": [5]}], SamplingParams(max_tokens=2))

    assert len(output.outputs[0].token_ids) == 2
