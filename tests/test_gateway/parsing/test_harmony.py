"""gpt-oss's chat format: its messages are separated into reasoning, text and calls, however the
text is cut."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_common.text.tokenizer import Tokenizer
from headrace_gateway.parsing.harmony.header import MARKERS, Begin, begin_of
from headrace_gateway.parsing.harmony.parser import HarmonyParser
from headrace_gateway.parsing.output import OutputForm, OutputParser
from headrace_gateway.parsing.parts import CallArguments, CallStart, Part, PartList, Reasoning, Text
from headrace_testing.tokenizers import harmony_tokenizer

ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = (
    '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"location":"SF"}'
)
KNOWN = ("get_weather", "python")
WEATHER = ("get_weather", '{"location":"SF"}')

# text, reasoning, text for the user, calls: in documented and other forms that models write
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (f"{ANALYSIS}Simple.{NEXT}{FINAL}2 + 2 = 4.<|return|>", "Simple.", "2 + 2 = 4.", []),
    (f"{ANALYSIS}Need to use it.{NEXT}{CALL}<|call|>", "Need to use it.", "", [WEATHER]),
    (
        f"{ANALYSIS}I plan.{NEXT}<|channel|>commentary<|message|>**Plan**:\n1. Look{NEXT}"
        "<|channel|>commentary to=functions.make<|constrain|>json<|message|> {} <|call|>",
        "I plan.",
        "**Plan**:\n1. Look",
        [("make", "{}")],
    ),
    (
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"location":"SF"}',
        "",
        "",
        [WEATHER],
    ),
    (
        f'{ANALYSIS}a{NEXT}<|channel|>analysis to=functions.f code<|message|>{{"a":"<|end|>"}}',
        "a",
        "",
        [("f", '{"a":"<|end|>"}')],
    ),
    (
        f"{ANALYSIS}a{NEXT}<|channel|>analysis to=browser.search code<|message|>"
        f'{{"q": 1}}{NEXT}<|channel|>analysis to=python code<|message|>print(1)<|call|>',
        'a\n\n{"q": 1}',
        "",
        [("python", "print(1)")],
    ),
    (
        f"{CALL}<|call|><|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"
        f"20{NEXT}<|channel|>commentary to=functions.now<|message|><|call|>",
        "20",
        "",
        [WEATHER, ("now", "{}")],
    ),
    (f"<|channel|>commentary<|message|>One.{NEXT}{FINAL}Two.", "", "One.\n\nTwo.", []),
    ("<|message|>No channel.", "", "No channel.", []),
    (" No header, a < b <|", "", " No header, a < b <|", []),
    (f"{FINAL}Yes <|en", "", "Yes <|en", []),
    (f"{FINAL}Yes<|return|>\n<|channel|>fi", "", "Yes", []),
    (f"{ANALYSIS}a<|end|><|channel|>final<|message|>b<|end|> \n c", "a", "b\n\n \n c", []),
    ("<|channel|>fin", "", "", []),
    ("to=functions.f and so on", "", "to=functions.f and so on", []),
    (f"{CALL[:-5]}", "", "", [("get_weather", '{"location":')]),
    ("<|channel|>" + "a" * 300, "", "<|channel|>" + "a" * 300, []),
]


def added_up(parts: Sequence[Part]) -> tuple[str, str, list[tuple[str, str]]]:
    texts = {Reasoning: "", Text: ""}
    calls: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case CallStart():
                calls.append((part.name, ""))
            case CallArguments():
                calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
            case _:
                texts[type(part)] += part.text
    return texts[Reasoning], texts[Text], calls


def read(pieces: Sequence[str], begin: Begin | None = None) -> Any:
    parser = HarmonyParser(PartList(), KNOWN, begin)
    parts = [part for piece in pieces for part in parser.push(piece)]
    return added_up(parts + parser.finish())


@pytest.mark.parametrize(("text", "reasoning", "shown", "calls"), CASES)
def test_each_message_is_parsed_according_to_its_header(
    text: str, reasoning: str, shown: str, calls: list[tuple[str, str]]
) -> None:
    assert read([text]) == (reasoning, shown, calls)
    assert read(list(text)) == (reasoning, shown, calls)


SHARDS = (
    *MARKERS,
    "assistant",
    "analysis",
    "final",
    "commentary",
    " to=functions.f",
    " to=python",
    " json",
    '{"a": "',
    '"}',
    "\n ",
    "text",
    "<|",
)


@settings(deadline=None)
@given(
    pieces=st.lists(st.sampled_from(SHARDS), max_size=16),
    begin=st.sampled_from([Begin(), Begin("assistant<|channel|>analysis", inside=True)]),
)
def test_the_parts_do_not_depend_on_how_the_text_is_split(pieces: list[str], begin: Begin) -> None:
    whole = read(["".join(pieces)], begin)

    assert read(pieces, begin) == whole
    assert read(list("".join(pieces)), begin) == whole


def test_reasoning_text_and_arguments_are_passed_on_as_they_come() -> None:
    parser = HarmonyParser(PartList(), KNOWN)

    assert parser.push(f"{ANALYSIS}Well <") == [Reasoning("Well ")]
    assert parser.push(f"b{NEXT}{FINAL}So") == [Reasoning("<b"), Text("So")]
    assert parser.push(f"{NEXT}{CALL[:-6]}") == [
        CallStart(0, "get_weather"),
        CallArguments(0, '{"location"'),
    ]


def test_without_tools_nothing_is_a_call() -> None:
    parser = HarmonyParser(PartList(), None)

    assert added_up(parser.push(f"{CALL}{NEXT}{FINAL}Hi")) == ('{"location":"SF"}', "Hi", [])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(harmony_tokenizer(), special_tokens={}, eos_token_ids=())


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", f"{FINAL}Yes.", ("", "Yes.", [])),
        (f"<|start|>assistant{FINAL}So ", "it is.", ("", "it is.", [])),
        (f"<|start|>assistant{ANALYSIS}So ", f"it is.{NEXT}{FINAL}a", ("it is.", "a", [])),
        ("<|start|>assistant<|channel|>analysis", "<|message|>a", ("a", "", [])),
        ("<|start|>user<|message|>Hi<|end|>", f"<|start|>assistant{FINAL}a", ("", "a", [])),
        ("no Harmony at all", "Yes.", ("", "Yes.", [])),
    ],
)
def test_an_answer_begins_where_its_prompt_ends(
    tokenizer: Tokenizer, prompt: str, answer: str, expected: Any
) -> None:
    assert read([answer], begin_of(tokenizer, tokenizer.encode(prompt))) == expected


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_reasoning_tokens_are_counted_for_any_split(tokenizer: Tokenizer, sizes: list[int]) -> None:
    prompt = tokenizer.encode("<|start|>assistant")
    thoughts = [f"{ANALYSIS}Well, 你.<|end|>", f"<|start|>assistant{ANALYSIS}So.<|end|>"]
    others = [f"<|start|>assistant<|channel|>commentary<|message|>I look.{NEXT}", f"{FINAL}Yes."]
    rest = tokenizer.encode("".join([*thoughts, *others]))
    parser = OutputParser(OutputForm(reasoning="openai_gptoss"), tokenizer, prompt)
    turn = 0
    while rest:
        size = sizes[turn % len(sizes)]
        parser.push("", rest[:size])
        rest, turn = rest[size:], turn + 1

    assert parser.reasoning_tokens == sum(len(tokenizer.encode(each)) for each in thoughts)
