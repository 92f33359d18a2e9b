"""Structured output in the engine: what grammars allow, on the demo model and on bare cursors.

JSON is checked with jsonschema, regular expressions with `re`. Not covered: the library's parsing
of schemas and grammars, and the gateway's checks.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from headrace_common.text.checkpoint import demo_folder
from headrace_common.text.tokenizer import Tokenizer
from headrace_engine import LLM, SamplingParams, StructuredOutputsParams
from headrace_engine.core.compiled_grammar import CompiledGrammar, GrammarCursor
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.errors import RequestError
from headrace_engine.core.outputs import SequenceOutput
from headrace_engine.core.request import EngineRequest, FinishReason, Sequence
from headrace_engine.core.step_plan import SampleRow
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.structured_output.compiler import GrammarCompiler
from headrace_engine.structured_output.masks import _mask_on_device, _mask_on_host, apply_grammars
from headrace_testing.tokenizers import byte_level_tokenizer

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_blocks": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "threads": 1,
}
EOS = (0, 2)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["water", "mills"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
TAG = {
    "structures": [{"begin": "e[", "schema": {"enum": ["x", "y"]}, "end": "]"}],
    "triggers": ["e"],
}
# This grammar never ends the output; the end-of-sequence tokens are made unlikely.
TAGGED: dict[str, Any] = {"structural_tag": TAG, "logit_bias": {0: -100.0, 2: -100.0}}
STRUCTURE = r'e\["[xy]"\]'
PROMPT = "Tell me of a miller."


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(demo_folder()), **OPTIONS)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Tokenizer.load(demo_folder()), 2048, frozenset(EOS))


def test_markers_that_are_single_tokens_match_these_tokens() -> None:
    """For example Qwen's `<tool_call>`: it is not a special token, and plain text never contains
    it."""
    backend = byte_level_tokenizer()
    backend.add_tokens([AddedToken("<f>", special=False, normalized=False)])
    tokenizer = Tokenizer(backend, special_tokens={}, eos_token_ids=EOS)
    tag = {"structures": [{"begin": "<f>", "schema": {"enum": ["x", "y"]}}], "triggers": ["<f>"]}
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, frozenset(EOS))
    grammar = compiler.compile(StructuredOutputsParams(structural_tag=tag))

    for text, fits in (('so <f>"x" <f>"y"', True), ('<f>"z"', False), ("<f ", True)):
        assert grammar.cursor().advance(tokenizer.encode(text), 0) is fits, text


def params(temperature: float = 0.0, **options: Any) -> SamplingParams:
    kind = {
        name: options.pop(name)
        for name in ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
        if name in options
    }
    options = {"max_tokens": 120, "seed": 7, **options}
    return SamplingParams(
        temperature=temperature, structured_outputs=StructuredOutputsParams(**kind), **options
    )


def answers(llm: LLM, *each: SamplingParams, prompt: str = PROMPT) -> list[str]:
    """Returns the texts, and checks that the grammar ended each of them."""
    outputs = llm.generate([prompt] * len(each), list(each), use_tqdm=False)
    choices = [choice for output in outputs for choice in output.outputs]
    assert {choice.finish_reason for choice in choices} == {"stop"}
    return [choice.text for choice in choices]


SCALARS = st.sampled_from(
    [
        {"type": "integer", "minimum": -5, "maximum": 999},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 6},
        {"type": "string", "pattern": "^[a-c]{2,4}$"},
        {"enum": ["red", "blue", 3, None]},
        {"const": {"fixed": [1, 2]}},
        {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]},
        {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 20},
    ]
)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }


SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(["a", "b c", 'q"uote', "é"]), inner, max_size=3).map(
            _object
        ),
        inner.map(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 2}),
    ),
    max_leaves=4,
)


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schemas=st.lists(SCHEMAS, min_size=1, max_size=8))
def test_every_answer_is_valid_for_its_schema(llm: LLM, schemas: list[dict[str, Any]]) -> None:
    each = [params(1.0, json=schema, max_tokens=300) for schema in schemas]
    for schema, text in zip(schemas, answers(llm, *each), strict=True):
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_kind_of_constraint_holds(llm: LLM, temperature: float) -> None:
    found = answers(
        llm,
        params(temperature, json=json.dumps(PERSON)),
        params(temperature, regex=r"[A-Z][a-z]{3}-\d{2}"),
        params(temperature, choice=["yes", "n.o", 'may "be"\n']),
        params(temperature, grammar='start: "<" WORD ">"\nWORD: /[a-z]{1,9}/'),
        params(temperature, grammar='root ::= "[" [0-9] "]"'),
    )

    jsonschema.validate(json.loads(found[0]), PERSON)
    assert re.fullmatch(r"[A-Z][a-z]{3}-\d{2}", found[1])
    assert found[2] in ("yes", "n.o", 'may "be"\n')
    assert re.fullmatch(r"<[a-z]{1,9}>", found[3])
    assert re.fullmatch(r"\[[0-9]\]", found[4])


def test_character_classes_match_ascii_only() -> None:
    """Holds in every kind of constraint. A model with random weights prefers no alphabet."""
    llm = LLM(str(demo_folder()), load_format="dummy", **OPTIONS)
    pattern = r"\d{4}\w{6}\s[^\W\d]{4}\S"
    kinds: list[dict[str, Any]] = [
        {"regex": pattern},
        {"grammar": f"start: T\nT: /{pattern}/"},
        {"json": {"type": "string", "pattern": f"^{pattern}$"}},
        {"structural_tag": {"format": {"type": "regex", "pattern": pattern}}},
    ]

    for kind in kinds:
        outputs = llm.generate([PROMPT], params(1.0, **kind, n=32), use_tqdm=False)
        texts = [choice.text for choice in outputs[0].outputs]
        if "json" in kind:
            texts = [json.loads(text) for text in texts]
        assert [text for text in texts if not re.fullmatch(pattern, text, re.ASCII)] == []


def test_a_structure_is_enforced_after_its_trigger(llm: LLM) -> None:
    """Every e begins a structure, of which the last may be cut off; much of the text is free."""
    outputs = llm.generate([PROMPT], params(1.0, **TAGGED, n=6), use_tqdm=False)
    found = [choice.text for choice in outputs[0].outputs]
    cut = r'(e(\[("([xy]"?)?)?)?)?'

    assert all(re.fullmatch(rf"([^e]|{STRUCTURE})*{cut}", text) for text in found)
    assert sum(len(re.findall(STRUCTURE, text)) for text in found) > 3
    assert sum(len(re.sub(STRUCTURE, "", text)) for text in found) > 20


def test_json_object_mode_returns_an_object(llm: LLM) -> None:
    prompt = 'Answer with {"ok": true} and nothing else. {"ok": true} is the answer:'
    text = (
        llm.generate([prompt], params(json_object=True, logit_bias={6: 5.0}), use_tqdm=False)[0]
        .outputs[0]
        .text
    )

    assert text.startswith("{")


def test_a_grammar_constrains_all_choices_of_a_request(llm: LLM) -> None:
    found = answers(llm, params(1.0, json=PERSON, n=5))

    for text in found:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(found)) > 1


def test_a_grammar_does_not_change_other_requests_of_the_batch(llm: LLM) -> None:
    plain = SamplingParams(temperature=1.0, seed=3, max_tokens=30)
    mixed = [plain, params(1.0, json=PERSON), plain, params(choice=["yes", "no"]), plain]
    alone = [llm.generate([PROMPT], one, use_tqdm=False)[0] for one in mixed]

    together = llm.generate([PROMPT] * len(mixed), mixed, use_tqdm=False)

    texts = [output.outputs[0].text for output in together]
    assert texts == [output.outputs[0].text for output in alone]


@pytest.mark.parametrize(
    "options",
    [
        {"ignore_eos": True},
        {"min_tokens": 60},
        {"min_tokens": 60, "ignore_eos": True, "stop_token_ids": [300]},
        {"logit_bias": {0: -100.0, 2: -100.0}},
        {"repetition_penalty": 2.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
    ],
)
def test_a_grammar_that_is_complete_ends_the_output(llm: LLM, options: dict[str, Any]) -> None:
    (found,) = answers(llm, params(1.0, regex="[a-f]{4}", **options))

    assert re.fullmatch("[a-f]{4}", found)


def test_min_tokens_is_respected_while_the_grammar_can_continue(llm: LLM) -> None:
    each = params(1.0, regex="[a-z ]+", min_tokens=25, max_tokens=40)

    output = llm.generate([PROMPT], each, use_tqdm=False)[0].outputs[0]

    assert len(output.token_ids) >= 25


def test_log_probabilities_are_the_models_own(llm: LLM) -> None:
    free = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=1, logprobs=3))
    constrained = llm.generate(
        [PROMPT], params(regex="[0-9]+", max_tokens=1, logprobs=3), use_tqdm=False
    )
    first, second = (output.outputs[0].logprobs for output in (free[0], constrained[0]))

    assert first is not None and second is not None
    best = {token for token, one in first[0].items() if one.rank <= 3}
    assert best <= second[0].keys()
    chosen = constrained[0].outputs[0].token_ids[0]
    assert chosen not in best and second[0][chosen].rank > 3


# In the engine's core: resumed, preempted, broken off


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(EngineConfig(model=str(demo_folder()), **OPTIONS))


@pytest.fixture(scope="module")
def small_runner() -> ModelRunner:
    options = {**OPTIONS, "num_blocks": 9, "max_model_len": 128}
    return ModelRunner(EngineConfig(model=str(demo_folder()), **options))


def request(
    compiler: GrammarCompiler, name: str, one: SamplingParams, resume: tuple[int, ...] = ()
) -> EngineRequest:
    assert one.structured_outputs is not None
    return EngineRequest(
        request_id=name,
        prompt_token_ids=(9, 10, 11, 12),
        params=one,
        seed=len(name),
        grammar=compiler.compile(one.structured_outputs),
        resume=(resume,) if resume else (),
    )


def run(runner: ModelRunner, *requests: EngineRequest) -> dict[str, list[SequenceOutput]]:
    engine = Engine(EngineConfig(model=str(demo_folder()), **OPTIONS), runner)
    outputs: dict[str, list[SequenceOutput]] = {each.request_id: [] for each in requests}
    for each in requests:
        engine.add_request(each)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    return outputs


def tokens(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("constraint", [{"json": PERSON}, TAGGED], ids=[*"jt"])
@pytest.mark.parametrize("cut", [1, 5, 17])
def test_a_resumed_output_continues_where_it_was(
    runner: ModelRunner, compiler: GrammarCompiler, cut: int, constraint: dict[str, Any]
) -> None:
    one = params(1.0, **constraint)
    whole = tokens(run(runner, request(compiler, "r", one))["r"])

    rest = tokens(run(runner, request(compiler, "r", one, tuple(whole[:cut])))["r"])

    assert whole[:cut] + rest == whole and len(rest) > 1


def test_preempted_outputs_equal_those_of_an_undisturbed_run(
    runner: ModelRunner, small_runner: ModelRunner, compiler: GrammarCompiler
) -> None:
    one = params(1.0, regex="([a-z]{2,5} ){25}[a-z]{1,4}[.]", max_tokens=100)
    requests = [request(compiler, "r" * count, one) for count in range(1, 7)]
    undisturbed = {name: tokens(found) for name, found in run(runner, *requests).items()}
    engine = Engine(EngineConfig(model="demo", **OPTIONS), small_runner)
    for each in requests:
        engine.add_request(each)
    found: dict[str, list[int]] = {each.request_id: [] for each in requests}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids

    assert engine.stats().preemptions > 0
    assert found == undisturbed


def test_resumed_output_that_does_not_match_ends_with_the_reason(
    runner: ModelRunner, compiler: GrammarCompiler
) -> None:
    other = run(runner, request(compiler, "ok", params(regex="[a-c]{3}")))["ok"]

    (ended,) = run(runner, request(compiler, "r", params(regex="[0-9]+"), (400, 401)))["r"]

    assert ended.finish_reason is FinishReason.ERROR and ended.token_ids == ()
    assert ended.reason is not None and "does not match" in ended.reason
    assert other[-1].finish_reason is FinishReason.STOP


def test_a_grammar_over_its_limits_ends_its_own_output_only(
    runner: ModelRunner, compiler: GrammarCompiler
) -> None:
    heavy = params(
        1.0, grammar='start: a* a* a* a* a*\na: b*\nb: "x"*', min_tokens=200, max_tokens=200
    )
    light = params(1.0, json=PERSON)

    found = run(runner, request(compiler, "heavy", heavy), request(compiler, "light", light))

    assert found["heavy"][-1].finish_reason is FinishReason.ERROR
    assert (found["heavy"][-1].reason or "").startswith("structured_outputs: ")
    assert found["light"][-1].finish_reason is FinishReason.STOP


def test_parameters_that_allow_no_token_end_the_output_with_the_reason(
    runner: ModelRunner, compiler: GrammarCompiler
) -> None:
    beginnings = _first(compiler.compile(StructuredOutputsParams(choice=["yes", "no"])))
    one = params(
        choice=["yes", "no"], bad_words_token_ids=tuple((token,) for token in sorted(beginnings))
    )

    (ended,) = run(runner, request(compiler, "r", one))["r"]

    assert ended.finish_reason is FinishReason.ERROR
    assert ended.reason == (
        "structured_outputs: nothing is left that it and the other parameters allow"
    )


def test_a_request_without_its_compiled_grammar_is_refused(runner: ModelRunner) -> None:
    engine = Engine(EngineConfig(model="demo", **OPTIONS), runner)
    bare = EngineRequest(request_id="r", prompt_token_ids=(5,), params=params(choice=["a"]), seed=1)

    with pytest.raises(RequestError, match="structured_outputs"):
        engine.add_request(bare)


# Cursors, masks, the compiler


def allowed(cursor: GrammarCursor, words: int) -> frozenset[int]:
    mask = np.zeros(words, dtype=np.int32)
    assert cursor.fill(mask.ctypes.data, mask.nbytes)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return frozenset(np.flatnonzero(bits).tolist())


def walk(compiled: CompiledGrammar, data: st.DataObject, length: int) -> Iterator[int]:
    """A random output that the grammar allows."""
    cursor, output = compiled.cursor(), [1]
    for _ in range(length):
        assert cursor.advance(output, 1)
        choices = sorted(allowed(cursor, compiled.words))
        token = data.draw(st.sampled_from(choices))
        yield token
        output.append(token)
        if token in EOS:
            return


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
@pytest.mark.parametrize("constraint", [{"json": PERSON}, {"structural_tag": TAG}], ids=[*"jt"])
def test_a_cursor_that_is_rolled_back_equals_a_new_one(
    compiler: GrammarCompiler, data: st.DataObject, constraint: dict[str, Any]
) -> None:
    """Half of the drafts are wrong, and only some are accepted."""
    compiled = compiler.compile(StructuredOutputsParams(**constraint))
    path = list(walk(compiled, data, 20))
    known, cursor, prompt = [1, 5], compiled.cursor(), 2
    while len(known) - prompt < len(path):
        done = len(known) - prompt
        drafts = tuple(path[done : done + data.draw(st.integers(0, 4))])
        if data.draw(st.booleans()):
            drafts += (data.draw(st.integers(3, 2047)),)
        for count in range(len(drafts) + 1):
            fresh = compiled.cursor()
            stands = fresh.advance([*known, *drafts[:count]], prompt)
            assert cursor.advance(known, prompt, drafts[:count]) is stands
            if not stands:
                break
            assert allowed(cursor, compiled.words) == allowed(fresh, compiled.words)
        known += path[done : done + data.draw(st.integers(1, 4))]
    assert cursor.error is None


# Constraints with one long text, and what precedes that text in the output.
LONG: dict[str, tuple[Callable[[str], dict[str, Any]], str]] = {
    "choice": (lambda text: {"choice": [text]}, ""),
    "regex": (lambda text: {"regex": text}, ""),
    "repetition": (lambda text: {"regex": f"({text}){{1000}}"}, ""),
    "grammar": (lambda text: {"grammar": f'start: "{text}"'}, ""),
    "json": (lambda text: {"json": {"const": text}}, '"'),
    "tag": (
        lambda text: {
            "structural_tag": {
                "structures": [{"begin": "e", "schema": {"const": text}}],
                "triggers": ["e"],
            }
        },
        'e"',
    ),
}


@pytest.mark.parametrize("kind", LONG)
def test_tokens_of_a_long_text_are_not_forced(kind: str, compiler: GrammarCompiler) -> None:
    """To force a token, the library reads all that must follow, in each step."""
    make, before = LONG[kind]
    tokenizer = Tokenizer.load(demo_folder())

    def after_the_beginning(text: str) -> frozenset[int]:
        """The tokens that may follow the first two letters."""
        compiled = compiler.compile(StructuredOutputsParams(**make(text)))
        cursor = compiled.cursor()
        assert cursor.advance(tokenizer.encode(f"{before}{text[:2]}"), 0)
        return allowed(cursor, compiled.words)

    short = after_the_beginning("mill of the miller")
    long = after_the_beginning("mill of the miller " * 500)
    assert {tokenizer.token_to_id("l"), tokenizer.token_to_id("ll")} <= long
    assert len(short) == 1 or kind == "repetition"


def test_rows_after_a_refused_draft_are_not_changed(compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(StructuredOutputsParams(regex="[a-c]+"))
    good, bad = sorted(_first(compiled) - set(EOS))[0], 1500
    one = Sequence(_bare(compiled), 0, [5, 6])
    rows = [SampleRow(one), SampleRow(one, (bad,)), SampleRow(one, (good,))]
    logits = torch.zeros(3, 2048)

    apply_grammars(logits, rows, frozenset(EOS))

    finite = torch.isfinite(logits).sum(-1).tolist()
    assert finite[0] == len(_first(compiled)) and finite[1] == 2048
    assert 0 < finite[2] <= len(_first(compiled)) + len(EOS)


def test_masks_are_the_same_on_a_device_as_on_the_host() -> None:
    """The device's code also runs on the host. The vocabulary does not fill its last mask word."""
    words = np.random.default_rng(1).integers(-(2**31), 2**31, (3, 65)).astype(np.int32)
    host = torch.zeros(5, 2050)
    device = host.clone()

    _mask_on_host(host, [0, 2, 4], words)
    _mask_on_device(device, [0, 2, 4], words)

    assert torch.equal(host, device)
    assert torch.isfinite(host[[1, 3]]).all() and not torch.isfinite(host[[0, 2, 4]]).all()


def _first(compiled: CompiledGrammar) -> frozenset[int]:
    cursor = compiled.cursor()
    assert cursor.advance([1], 1)
    return allowed(cursor, compiled.words)


def _bare(compiled: CompiledGrammar) -> EngineRequest:
    return EngineRequest(
        request_id="r",
        prompt_token_ids=(5, 6),
        params=params(choice=["a"]),
        seed=0,
        grammar=compiled,
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"regex": "(a"}, "regex: unclosed group"),
        ({"regex": r"(a)\1"}, "regex: backreferences"),
        ({"json": {"type": "thing"}}, "json: Invalid type: thing"),
        ({"json": {"uniqueItems": True, "type": "array"}}, "uniqueItems"),
        ({"grammar": "start: missing"}, 'unknown name: "missing"'),
        ({"grammar": "nothing"}, "neither Lark"),
    ],
)
def test_grammars_that_cannot_be_compiled_are_refused(
    compiler: GrammarCompiler, kind: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match="structured_outputs") as caught:
        compiler.compile(StructuredOutputsParams(**kind))
    assert message in str(caught.value)


def test_compiled_grammars_are_cached_by_content_up_to_a_number() -> None:
    compiler = GrammarCompiler(Tokenizer.load(demo_folder()), 2048, frozenset(EOS), cache_size=2)
    first = compiler.compile(StructuredOutputsParams(json={"type": "integer"}))
    assert compiler.compile(StructuredOutputsParams(json='{ "type":"integer" }')) is first

    for index in range(2):
        compiler.compile(StructuredOutputsParams(regex=f"a{{{index + 1}}}"))

    assert compiler.compile(StructuredOutputsParams(json={"type": "integer"})) is not first


def test_a_model_without_an_end_of_sequence_token_cannot_be_constrained() -> None:
    compiler = GrammarCompiler(Tokenizer.load(demo_folder()), 2048, frozenset())

    with pytest.raises(RequestError, match="end-of-sequence"):
        compiler.compile(StructuredOutputsParams(choice=["a"]))
