"""With a structured output, reasoning is free and what follows it must match.

A model that chooses at random is constrained by the grammar, token by token, for every reasoning
format and every kind of constraint.
"""

import json
import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from headrace_common.sampling.params import SamplingParams
from headrace_common.structured.grammars import GrammarChecker, grammar_text, parser_limits
from headrace_common.structured.structured import StructuredOutputsParams
from headrace_common.text.chat_template import ChatTemplate
from headrace_common.text.tokenizer import Tokenizer
from headrace_gateway.parsing.harmony.header import CHANNEL, END, MARKERS, MESSAGE, START
from headrace_gateway.parsing.output import OutputForm, OutputParser
from headrace_gateway.parsing.parts import Reasoning, Text
from headrace_gateway.parsing.reasoning.catalog import FAMILIES
from headrace_gateway.parsing.strict_calls import at_prompt, constrained_answer
from headrace_testing.tokenizers import byte_level_tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"river": {"enum": ["Po", "Isar"]}, "km": {"type": "integer", "maximum": 999}},
    "required": ["river", "km"],
    "additionalProperties": False,
}
HARMONY = "openai_gptoss"
LONG = "|".join(f"word{number}" for number in range(300))  # over 1,024 characters


def is_json(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def matches(pattern: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text, re.ASCII), text

    return check


CONSTRAINTS: dict[str, tuple[StructuredOutputsParams, Callable[[str], None]]] = {
    "json": (StructuredOutputsParams(json=SCHEMA), is_json),
    "regex": (StructuredOutputsParams(regex="[ab]{2,5}-[0-9]"), matches("[ab]{2,5}-[0-9]")),
    "long regex": (StructuredOutputsParams(regex=LONG), matches(LONG)),
    "choice": (StructuredOutputsParams(choice=["yes", "no"]), matches("yes|no")),
    "lark": (
        StructuredOutputsParams(grammar='start: WORD ("," WORD)* "."\nWORD: /[a-z]{1,4}/'),
        matches(r"[a-z]{1,4}(,[a-z]{1,4})*\."),
    ),
    "gbnf": (
        StructuredOutputsParams(grammar='root ::= "a" root "b" | "c"'),
        lambda text: matches("a*cb*")(text),
    ),
}


@cache
def tokenizer(spelling: str) -> tuple[Tokenizer, LLTokenizer]:
    """The markers are special tokens, other added tokens, or ordinary text."""
    backend = byte_level_tokenizer()
    if spelling != "text":
        markers = {each for one in FAMILIES.values() for each in (one.opening, one.closing)}
        backend.add_tokens(
            [
                AddedToken(each, special=spelling == "special", normalized=False)
                for each in sorted(markers | set(MARKERS))
            ]
        )
    made = Tokenizer(backend, special_tokens={}, eos_token_ids=[0])
    return made, LLTokenizer(made.to_json(), n_vocab=made.vocab_size, eos_token=0)


def matcher_of(held: StructuredOutputsParams, spelling: str) -> LLMatcher:
    text, vocabulary = tokenizer(spelling)
    special = {
        word: token_id
        for word, token_id in text.added_tokens.items()
        if vocabulary.is_special_token(token_id)
    }
    grammar = grammar_text(held, special)
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def finished(matcher: LLMatcher, ids: list[int], vocab: int, seed: int) -> list[int]:
    """The output after these tokens, of a model that chooses at random."""
    chance = random.Random(seed)
    assert matcher.consume_tokens(ids), matcher.get_error()
    ids = list(ids)
    while not matcher.is_stopped() and not (matcher.is_accepting() and chance.random() < 0.3):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [number for number in range(1, vocab) if bits >> number & 1]
        if not allowed:
            break
        ids.append(chance.choice(allowed))
        assert matcher.consume_tokens(ids[-1:]), matcher.get_error()
    return ids


def read(form: OutputForm, text: Tokenizer, prompt: Sequence[int], ids: list[int]) -> list[str]:
    parser = OutputParser(form, text, prompt)
    parts = [*parser.push(text.decode(ids, skip_special_tokens=False), ids), *parser.finish()]
    assert all(isinstance(each, Reasoning | Text) for each in parts)
    return [
        "".join(each.text for each in parts if isinstance(each, kind)) for kind in (Reasoning, Text)
    ]


def at(held: StructuredOutputsParams, form: OutputForm, text: Tokenizer, prompt: list[int]) -> Any:
    begun = at_prompt(SamplingParams(structured_outputs=held), form, text, prompt)
    return begun.structured_outputs


@pytest.mark.parametrize("spelling", ["text", "added", "special"])
@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize("name", [*FAMILIES, HARMONY])
def test_reasoning_is_free_and_what_follows_must_match(name: str, kind: str, spelling: str) -> None:
    constraint, check = CONSTRAINTS[kind]
    form = OutputForm(reasoning=name)
    held = constrained_answer(constraint, form)
    GrammarChecker().check(held)
    text, _ = tokenizer(spelling)
    thought = 'Is it {"river": "Rhine"}, or (yes, [no]?\n\nHm.'
    if name == HARMONY:
        start = f"{CHANNEL}analysis{MESSAGE}{thought}"
        prompt = ""
        answer = f"{END}{START}assistant{CHANNEL}final{MESSAGE}"
    else:
        family = FAMILIES[name]
        prompt = f"{family.opening}{family.label}\n"
        start, answer = thought, f"\n{family.closing}\n\n"
    for opened in (True, False):
        begin = start if opened or name == HARMONY else prompt + start
        before = text.encode(f"Go:{prompt}" if opened else "Go:")
        constrained = at(held, form, text, before)
        words = text.encode(begin)
        vocab = text.vocab_size
        for seed in range(2):
            ids = finished(
                matcher_of(constrained, spelling), text.encode(begin + answer), vocab, seed
            )
            reasoning, final = read(form, text, before, ids)
            assert reasoning == thought
            check(final)
        matcher = matcher_of(constrained, spelling)
        assert matcher.validate_tokens([*words, 0]) == len(words)  # reasoning is not an answer
        wrong = text.encode(f"{begin}{answer}~")
        assert matcher.validate_tokens(wrong) < len(wrong)


@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_after_reasoning_that_the_prompt_closes_nothing_is_free(name: str, kind: str) -> None:
    constraint, check = CONSTRAINTS[kind]
    form, family = OutputForm(reasoning=name), FAMILIES[name]
    text, _ = tokenizer("special")
    prompt = text.encode(f"Go:{family.opening}\n\n{family.closing}\n\n")
    held = at(constrained_answer(constraint, form), form, text, prompt)
    ids = finished(matcher_of(held, "special"), [], text.vocab_size, 3)

    check(text.decode(ids, skip_special_tokens=False))
    assert not matcher_of(held, "special").validate_tokens(text.encode(family.opening))


EXAMPLES = {
    "json": '{"river":"Po","km":6}',
    "regex": "aab-7",
    "long regex": "word17",
    "choice": "yes",
    "lark": "so,it.",
    "gbnf": "aacbb",
}


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_a_model_that_need_not_reason_may_answer_at_once(kind: str) -> None:
    text, _ = tokenizer("special")
    ids = text.encode(EXAMPLES[kind])
    for name, free in (("qwen3", False), ("deepseek_r1", True)):
        held = constrained_answer(CONSTRAINTS[kind][0], OutputForm(reasoning=name))
        assert matcher_of(held, "special").validate_tokens(ids) == len(ids)
        wrong = text.encode(f"{EXAMPLES[kind]}~")
        assert (matcher_of(held, "special").validate_tokens(wrong) == len(wrong)) is free


_TURN = "{{ messages[0].content }}:"
_CLOSES = "{% if not enable_thinking %}<think></think>{% endif %}"
_OPENS = "{% if enable_thinking %}<think>{% endif %}"


@pytest.mark.parametrize(
    ("template", "variables", "thought", "allowed"),
    [
        (_TURN + _OPENS, {"enable_thinking": True}, "Hm.</think>", True),
        (_TURN + _OPENS, {}, "<think>Hm.</think>", False),
        (_TURN + _CLOSES, {"enable_thinking": True}, "<think>Hm.</think>", True),
        (_TURN + _CLOSES, {}, "<think>Hm.</think>", False),
        (_TURN, {}, "<think>Hm.</think>", True),
        ("{{ raise_exception(effort) if reasoning_effort }}" + _TURN, {}, "<think></think>", True),
    ],
)
def test_no_reasoning_precedes_a_structure_if_the_template_has_not_opened_it(
    template: str, variables: dict[str, bool], thought: str, allowed: bool
) -> None:
    constraint, _ = CONSTRAINTS["choice"]
    form = OutputForm(reasoning="qwen3")
    text, _ = tokenizer("text")
    shown = ChatTemplate(template)
    prompt = text.encode(shown.render([{"role": "user", "content": "Go"}], variables=variables))
    sampling = SamplingParams(structured_outputs=constrained_answer(constraint, form))

    begun = at_prompt(sampling, form, text, prompt, shown).structured_outputs
    assert begun is not None
    answer = text.encode(f"{thought}yes")

    matcher = matcher_of(begun, "text")
    assert (matcher.validate_tokens(answer) == len(answer)) is allowed
    assert allowed or matcher.validate_tokens(text.encode("yes")) == len(text.encode("yes"))
