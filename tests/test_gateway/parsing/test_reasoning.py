"""The separation of reasoning from the answer, however the text is cut."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from headrace_common.text.tokenizer import Tokenizer
from headrace_gateway.parsing.output import OutputForm, OutputParser
from headrace_gateway.parsing.parts import Part, Reasoning, Text
from headrace_gateway.parsing.reasoning.catalog import detect_reasoning_parser
from headrace_gateway.parsing.reasoning.think import Begin, ThinkParser
from headrace_testing.tokenizers import byte_level_tokenizer

# begin, whether an opening marker may be missing, text, reasoning, answer
CASES = [
    (Begin.OPEN, False, "<think>\nWell.\n</think>\n\nYes.", "Well.", "Yes."),
    (Begin.OPEN, False, "\n<think>a\nb</think>c\n", "a\nb", "c\n"),
    (Begin.OPEN, False, "Yes <think>no</think>", "", "Yes <think>no</think>"),
    (Begin.OPEN, False, "<think></think>Yes", "", "Yes"),
    (Begin.OPEN, False, "<think>not over", "not over", ""),
    (Begin.OPEN, False, "<thi", "", "<thi"),
    (Begin.OPEN, False, "  two spaces", "", "  two spaces"),
    (Begin.OPEN, False, "", "", ""),
    (Begin.OPEN, True, "Well.</think>Yes", "Well.", "Yes"),
    (Begin.OPEN, True, "<think>Well.</think>Yes", "Well.", "Yes"),
    (Begin.INSIDE, False, "\nWell. < b\n\n</think>\n\nYes", "Well. < b", "Yes"),
    (Begin.INSIDE, False, "<think>\nWell.</think>Yes", "Well.", "Yes"),
    (Begin.INSIDE, False, "never over\n</thi", "never over\n</thi", ""),
    (Begin.CLOSED, True, "Yes </think> <think>", "", "Yes </think> <think>"),
]


def parser(begin: Begin, missing: bool) -> ThinkParser:
    return ThinkParser("<think>", "</think>", begin, otherwise_inside=missing)


# With a label after the opening marker.
LABELLED = [
    ("<think>thought\nWell.</think>Yes", "Well.", "Yes"),
    ("<think>though</think>Yes", "though", "Yes"),
    ("<think>thought</think>Yes", "", "Yes"),
    ("<think>thou", "thou", ""),
]


@pytest.mark.parametrize(("text", "reasoning", "answer"), LABELLED)
def test_a_label_goes_with_its_marker(text: str, reasoning: str, answer: str) -> None:
    for pieces in ([text], list(text)):
        labelled = ThinkParser(
            "<think>", "</think>", Begin.OPEN, otherwise_inside=False, label="thought"
        )
        assert read(labelled, pieces) == (reasoning, answer)


def read(parser: ThinkParser, pieces: Sequence[str]) -> tuple[str, str]:
    parts: list[Part] = [part for piece in pieces for part in parser.push(piece)]
    parts += parser.finish()
    return (
        "".join(part.text for part in parts if isinstance(part, Reasoning)),
        "".join(part.text for part in parts if isinstance(part, Text)),
    )


@pytest.mark.parametrize(("begin", "missing", "text", "reasoning", "answer"), CASES)
def test_text_between_the_markers_is_reasoning(
    begin: Begin, missing: bool, text: str, reasoning: str, answer: str
) -> None:
    assert read(parser(begin, missing), [text]) == (reasoning, answer)
    assert read(parser(begin, missing), list(text)) == (reasoning, answer)


FRAGMENTS = ("<think>", "</think>", "\n", " ", "word", "<", "think>", "/")


@given(
    begin=st.sampled_from(Begin),
    missing=st.booleans(),
    pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
)
def test_reasoning_does_not_depend_on_how_the_text_is_split(
    begin: Begin, missing: bool, pieces: list[str]
) -> None:
    text = "".join(pieces)
    whole = read(parser(begin, missing), [text])

    assert read(parser(begin, missing), pieces) == whole
    assert read(parser(begin, missing), list(text)) == whole


def test_reasoning_is_passed_on_as_it_comes() -> None:
    reading = parser(Begin.INSIDE, False)

    assert reading.push("Well, ") == [Reasoning("Well, ")]
    assert reading.push("so\n") == [Reasoning("so")]
    assert reading.push("it is</") == [Reasoning("\nit is")]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ content.split('</think>') }}", "qwen3"),
        ("{{ '[/THINK]' }}", "mistral"),
        ("{{ '<|channel>thought\n<channel|>' }}", "gemma4"),
        ("{{ '<|channel|>final<|message|>' }}", "openai_gptoss"),
        ("{{ messages }}", None),
    ],
)
def test_the_markers_are_found_in_the_template(template: str, name: str | None) -> None:
    assert detect_reasoning_parser(template) == name


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_reasoning_tokens_are_counted_for_any_split(sizes: list[int]) -> None:
    backend = byte_level_tokenizer(300)
    backend.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    tokenizer = Tokenizer(backend, special_tokens={}, eos_token_ids=())
    ids = tokenizer.encode("<think>Well, well.</think>It is so.")
    reading = OutputParser(OutputForm(reasoning="qwen3"), tokenizer, ())
    rest, turn = list(ids), 0
    while rest:
        size = sizes[turn % len(sizes)]
        some, rest, turn = rest[:size], rest[size:], turn + 1
        reading.push(tokenizer.decode(some), some)
    reading.finish()

    closing = tokenizer.token_to_id("</think>")
    assert closing is not None
    assert reading.reasoning_tokens == ids.index(closing) + 1
