"""The bundled demo model: it is small, loads with standard tools and writes readable answers."""

import json
import operator
import random
import re
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer

from dialogues import AGENT_KINDS, Dialogue, agent_dialogues, generate, probes
from exercises import sums
from headrace_common.text.checkpoint import demo_folder
from headrace_engine import LLM, SamplingParams, StructuredOutputsParams
from promises import PROMISES, ask
from review import MAX_NEW_TOKENS, Talker, answer_of, same_data
from tokens import FILE, encode
from tools import call, definition

FOLDER = demo_folder()
LIMIT_BYTES = 9_500_000
_SUM = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)\.")
_OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


# Of PROBES dialogues that were not in the training text; the shipped model answers more.
PROBES = 30
LEAST = {
    "calls": 20,
    "results": 20,
    "thoughts": 20,
    "json": 20,
    "values": 12,
    "passages": 20,
    "copies": 15,
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("headrace-demo", num_blocks=64)


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


def test_the_tokenizer_is_the_one_that_the_recipe_trains_with() -> None:
    assert (FOLDER / "tokenizer.json").read_bytes() == FILE.read_bytes()


def test_a_strange_word_has_the_same_tokens_with_a_space_before_it() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))

    tokens = tokenizer.encode("Quirbolax Quirbolax").tokens
    half = len(tokens) // 2

    assert tokens == [*tokens[:half], "Ġ", *tokens[:half]]


def test_the_chat_template_marks_the_roles() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello!"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def shown(dialogue: Dialogue) -> str:
    """A dialogue as the shipped chat template writes it, up to the last reply."""
    tokenizer: Any = AutoTokenizer.from_pretrained(FOLDER)
    system = [{"role": "system", "content": dialogue.system}] if dialogue.system else []
    chat = [*system, *(message for turn in dialogue.turns for message in turn.messages)]
    return str(
        tokenizer.apply_chat_template(
            chat[:-1],
            tools=list(map(definition, dialogue.tools)),
            add_generation_prompt=True,
            tokenize=False,
            **({"reasoning_effort": dialogue.effort} if dialogue.effort else {}),
        )
    )


def test_the_model_learns_what_the_chat_template_writes() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    chats = [dialogue for dialogue in generate(100, seed=3) if dialogue.turns]
    whole = [
        tokenizer.decode(encode(tokenizer, dialogue).ids, skip_special_tokens=False)
        for dialogue in chats
    ]

    assert any(dialogue.tools for dialogue in chats) and any(chat.effort for chat in chats)
    for dialogue, text in zip(chats, whole, strict=True):
        assert text.startswith(shown(dialogue))


def test_calls_in_the_history_are_written_as_the_model_writes_them() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(FOLDER)
    written = call("calculate", {"expression": "1 + 2"})
    function = {"name": "calculate", "arguments": {"expression": "1 + 2"}}
    forms = [
        {"role": "assistant", "content": written},
        {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
        {
            "role": "assistant",
            "tool_calls": [{"function": {**function, "arguments": '{"expression": "1 + 2"}'}}],
        },
    ]
    texts = {
        tokenizer.apply_chat_template([{"role": "user", "content": "1 + 2"}, form], tokenize=False)
        for form in forms
    }

    assert len(texts) == 1


@pytest.mark.parametrize(
    ("variables", "ending", "line"),
    [
        ({}, "assistant\n", None),
        ({"reasoning_effort": "none"}, "assistant\n", None),
        ({"reasoning_effort": "minimal"}, "assistant\n<think>\n", "Reasoning: low"),
        ({"reasoning_effort": "high"}, "assistant\n<think>\n", "Reasoning: high"),
        ({"enable_thinking": True}, "assistant\n<think>\n", "Reasoning: low"),
        ({"reasoning_effort": "high", "enable_thinking": False}, "assistant\n", None),
    ],
)
def test_efforts_switch_thoughts(variables: dict[str, Any], ending: str, line: str | None) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(FOLDER)
    chat = [{"role": "user", "content": "Hello!"}]
    text = tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True, **variables
    )

    assert text.endswith(ending)
    assert ("Reasoning" in text) is (line is not None) and (line or "") in text


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


@pytest.fixture(scope="module")
def promised(talker: Talker) -> list[str]:
    """What the model says to all prompts of PROMISES, which are one batch."""
    return talker.answers([dialogue for dialogue, _ in PROMISES])


@pytest.mark.parametrize("number", range(len(PROMISES)))
def test_the_model_answers_as_the_documentation_shows(promised: list[str], number: int) -> None:
    assert answer_of(promised[number]) == PROMISES[number][1]


def test_the_model_remembers_earlier_turns(talker: Talker) -> None:
    chat = [
        {"role": "user", "content": "My name is Emma."},
        {"role": "assistant", "content": "Nice to meet you, Emma! How can I help you?"},
        {"role": "user", "content": "What is my name?"},
    ]
    assert talker.replies([chat]) == ["Your name is Emma."]


def test_more_effort_means_longer_thoughts(talker: Talker) -> None:
    low, high = talker.answers(
        [ask("What is 7 + 8?", effort="low"), ask("What is 7 + 8?", effort="high")]
    )

    assert 0 < low.index("</think>") < high.index("</think>")


class EngineTalker(Talker):
    """Replies of this project's engine, which batches them at a fraction of the cost."""

    def __init__(self) -> None:
        super().__init__(FOLDER)
        self._llm = LLM("headrace-demo", dtype="float32", num_blocks=2048)

    def _group(self, prompts: list[str], temperature: float) -> list[str]:
        params = SamplingParams(temperature=temperature, max_tokens=MAX_NEW_TOKENS)
        found = [one.outputs[0] for one in self._llm.generate(prompts, params, use_tqdm=False)]
        return [one.text + " ..." * (one.finish_reason != "stop") for one in found]


@pytest.fixture(scope="module")
def engine_talker() -> EngineTalker:
    return EngineTalker()


@pytest.mark.parametrize(("kind", "least"), LEAST.items())
def test_most_unseen_agent_dialogues_are_answered_right(
    engine_talker: EngineTalker, kind: str, least: int
) -> None:
    wanted = agent_dialogues(kind, PROBES, seed=7)
    replies = map(answer_of, engine_talker.answers(wanted))

    right = sum(
        reply == dialogue.turns[-1].reply
        or same_data(kind, reply, dialogue.turns[-1].reply, dialogue)
        for reply, dialogue in zip(replies, wanted, strict=True)
    )
    assert right >= least


def test_every_kind_is_scored() -> None:
    assert LEAST.keys() == AGENT_KINDS.keys()


def test_a_schema_is_filled_with_what_the_prompt_says(llm: LLM) -> None:
    properties = {"name": {"type": "string"}, "age": {"type": "integer"}}
    constraint = StructuredOutputsParams(
        json={"type": "object", "properties": properties, "required": list(properties)}
    )
    (output,) = llm.chat(
        [{"role": "user", "content": "My name is Emma and I am 31."}],
        SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=constraint),
    )

    assert json.loads(output.outputs[0].text) == {"name": "Emma", "age": 31}


@pytest.mark.parametrize(
    "prompt", ["Tell me of a mill.", "What is Headrace?", "My name is Emma and I am 31.", "Hello!"]
)
def test_json_by_an_open_schema_ends_soon(llm: LLM, prompt: str) -> None:
    kinds = {"name": "string", "age": "integer", "open": "boolean"}
    properties: dict[str, Any] = {name: {"type": kind} for name, kind in kinds.items()}
    properties["tags"] = {"type": "array", "items": {"type": "string"}}
    constraint = StructuredOutputsParams(json={"type": "object", "properties": properties})
    (output,) = llm.chat(
        [{"role": "user", "content": prompt}],
        SamplingParams(temperature=0.0, max_tokens=200, structured_outputs=constraint),
    )

    (answer,) = output.outputs
    assert answer.finish_reason == "stop"
    assert isinstance(json.loads(answer.text), dict)
    assert len(answer.token_ids) <= 100


def test_the_offline_api_loads_the_demo_model_by_its_name() -> None:
    llm = LLM("headrace-demo", skip_tokenizer_init=True, num_blocks=8)

    (output,) = llm.generate([{"prompt_token_ids": [5]}], SamplingParams(max_tokens=2))

    assert len(output.outputs[0].token_ids) == 2
