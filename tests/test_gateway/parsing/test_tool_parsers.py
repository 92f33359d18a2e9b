"""Parsers of tool calls separate calls from text, however the text is split."""

import json
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_gateway.parsing.parts import CallArguments, CallStart, Part, PartList, Text
from headrace_gateway.parsing.tool_calls.base import ToolParser
from headrace_gateway.parsing.tool_calls.call_object import MAX_UNCERTAIN_CHARS
from headrace_gateway.parsing.tool_calls.catalog import PARSERS, detect_tool_parser
from headrace_gateway.parsing.tool_calls.forced import NamedParser, RequiredParser
from headrace_testing.call_examples import EXAMPLES

KNOWN: Mapping[str, Mapping[str, str]] = {
    "weather": {"city": "text", "near": "nullable", "days": "json"},
    "time.now": {},
    "now": {},
    "add": {"a": "json"},
}
CALL = '{"name": "weather", "arguments": {"city": "Par\\"is", "days": [1, {"a": "}"}]}}'
ARGUMENTS = '{"city": "Par\\"is", "days": [1, {"a": "}"}]}'
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"

# format, text, the remaining text (None: all of it), the calls
CASES: list[tuple[str, str, str | None, list[tuple[str, str]]]] = [
    ("hermes", "Hello, world", "Hello, world", []),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [("weather", ARGUMENTS)]),
    (
        "hermes",
        f"Let me see.\n\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>"
        '{"arguments": {"a": 1}, "name": "add"}</tool_call>\n',
        "Let me see.",
        [("weather", ARGUMENTS), ("add", '{"a": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call> done', " done", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    ("hermes", f"<tool_call>{CALL}", "", [("weather", ARGUMENTS)]),
    ("hermes", f"<tool_call>{CALL}</tool", "", [("weather", ARGUMENTS)]),
    ("hermes", f"<tool_call>{CALL} and so on", " and so on", [("weather", ARGUMENTS)]),
    ("hermes", f"<tool_call>{CALL}{CALL}", CALL, [("weather", ARGUMENTS)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1', "", [("f", '{"a": [1')]),
    ("hermes", "<tool_call>\nno json\n</tool_call>", None, []),
    ("hermes", "a  <tool_call> <tool_call>", None, []),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}', None, []),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}', None, []),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>', None, []),
    ("hermes", "1 < 2 and <tool_ca", None, []),
    ("hermes", "spaces at the end  \n", None, []),
    (
        "hermes",
        f"<tool_call><tool_call>{CALL}</tool_call>",
        "<tool_call>",
        [("weather", ARGUMENTS)],
    ),
    (
        "mistral",
        f'[TOOL_CALLS][{CALL}, {{"name": "add", "arguments": {{}}, "id": "abc"}}]',
        "",
        [("weather", ARGUMENTS), ("add", "{}")],
    ),
    ("mistral", "[TOOL_CALLS] []", None, []),
    ("mistral", "[TOOL_CALLS] [1]", None, []),
    ("mistral", f"[TOOL_CALLS][{CALL}", "", [("weather", ARGUMENTS)]),
    (
        "mistral",
        'Well. [TOOL_CALLS]add{"a": 1}[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{"b": "}"}',
        "Well.",
        [("add", '{"a": 1}'), ("weather", '{"b": "}"}')],
    ),
    ("mistral", "[TOOL_CALLS]are great, and {so on}", None, []),
    ("mistral", "[TOOL_CALLS]" + "a" * 400, None, []),
    (
        "llama3_json",
        '{"name": "weather", "parameters": {"city": "Rome"}}',
        "",
        [("weather", '{"city": "Rome"}')],
    ),
    (
        "llama3_json",
        ' {"type": "function", "name": "add", "parameters": {"a": 1}}; \n'
        '{"name": "weather", "parameters": {}}',
        "",
        [("add", '{"a": 1}'), ("weather", "{}")],
    ),
    (
        "llama3_json",
        '{"name": "add", "parameters": {}}\n{"name": "weather", "parameters": {}}',
        "",
        [("add", "{}"), ("weather", "{}")],
    ),
    (
        "llama3_json",
        '{"name": "add", "parameters": {}} {"no": "call"}',
        ' {"no": "call"}',
        [("add", "{}")],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"name": "other", "parameters": {}}',
        "",
        [("other", "{}")],
    ),
    ("llama3_json", '{"name": "other", "parameters": {}}', None, []),
    ("llama3_json", '{"answer": 42}', None, []),
    ("llama3_json", '<|python_tag|>search.call(query="a")', None, []),
    ("llama3_json", 'I say {"name": "add", "parameters": {}}', None, []),
    ("llama3_json", '{"name": "add", "par', None, []),
    ("llama3_json", "<|python", None, []),
    (
        "llama3_json",
        '{"name": "add", "parameters": {}} is it.',
        " is it.",
        [("add", "{}")],
    ),
    (
        "llama3_json",
        '{"name": "add", "parameters": {}}; {"no": 1}',
        '; {"no": 1}',
        [("add", "{}")],
    ),
    (
        "pythonic",
        "[weather(city='Par)is', days=[1, (2, 3)], deep={'a': None, 'b': true}), time.now()]",
        "",
        [
            ("weather", '{"city": "Par)is", "days": [1, [2, 3]], "deep": {"a": null, "b": true}}'),
            ("time.now", "{}"),
        ],
    ),
    (
        "pythonic",
        "<|python_start|>[add(a=-1.5, b=False)]<|python_end|>",
        "",
        [("add", '{"a": -1.5, "b": false}')],
    ),
    ("pythonic", "[other(a=1)]", None, []),
    ("pythonic", "[add(1, 2)]", None, []),
    ("pythonic", "[add(a=b)]", None, []),
    ("pythonic", "[add(a={1: {2}})]", None, []),
    ("pythonic", "[1, 2, 3]", None, []),
    ("pythonic", "[add(a='x", None, []),
    ("pythonic", "[", None, []),
    ("pythonic", "A list: [add(a=1)]", None, []),
    ("pythonic", "[add(a=1), so it is]", " so it is]", [("add", '{"a": 1}')]),
    ("pythonic", "[add(a=1)] is it", " is it", [("add", '{"a": 1}')]),
    ("pythonic", "[add(" + "(" * 300, None, []),
    ("granite", f"So: <|tool_call|>[{CALL}]", "So:", [("weather", ARGUMENTS)]),
    ("phi4_mini_json", 'functools[{"name": "add", "arguments": {}}]', "", [("add", "{}")]),
    ("phi4_mini_json", "functools and such", None, []),
    ("jamba", f"<tool_calls>[{CALL}]</tool_calls>!", "!", [("weather", ARGUMENTS)]),
    ("jamba", f"<tool_calls>[{CALL}", "", [("weather", ARGUMENTS)]),
    (
        "deepseek_v3",
        f'Well.\n{DEEPSEEK}function<｜tool▁sep｜>add\n```json\n{{"a": 1}}\n```'
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time.now\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Well.",
        [("add", '{"a": 1}'), ("time.now", "{}")],
    ),
    (
        "deepseek_v31",
        f"{DEEPSEEK}add<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁call▁begin｜>weather"
        f"<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜> done",
        " done",
        [("add", "{}"), ("weather", ARGUMENTS)],
    ),
    ("deepseek_v31", f"{DEEPSEEK}add{{}}", None, []),
    ("deepseek_v31", f"{DEEPSEEK}add<｜tool▁sep｜>{{}} and", " and", [("add", "{}")]),
    (
        "kimi_k2",
        f'{KIMI}functions.time.now:0<|tool_call_argument_begin|>{{"a": "}}"}}<|tool_call_end|>'
        "<|tool_call_begin|>add:12 <|tool_call_argument_begin|> {}<|tool_call_end|>\n"
        "<|tool_calls_section_end|>",
        "",
        [("time.now", '{"a": "}"}'), ("add", "{}")],
    ),
    ("kimi_k2", f"{KIMI}functions.add:0<|tool_call_end|>", None, []),
    ("kimi_k2", f'{KIMI}add:0<|tool_call_argument_begin|>{{"a', "", [("add", '{"a')]),
    (
        "qwen3_coder",
        'I go.\n<tool_call>\n<function=weather>\n<parameter=city>\nPar"is\n <b>\n</parameter>\n'
        '<parameter=near>\nnull\n</parameter>\n<parameter=days>\n[1, {"a": "</parameter>"}]\n'
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time.now>\n</function>\n"
        "</tool_call>",
        "I go.",
        [
            (
                "weather",
                '{"city": "Par\\"is\\n <b>", "near": null, "days": [1, {"a": "</parameter>"}]}',
            ),
            ("time.now", "{}"),
        ],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=add><parameter=a>True</parameter><parameter=b>['x', None]</parameter>"
        "<parameter=c>so</parameter><parameter=d>NaN</parameter></tool_call>!",
        "!",
        [("add", '{"a": true, "b": ["x", null], "c": "so", "d": "NaN"}')],
    ),
    ("qwen3_coder", "<tool_call><function=add>so", "so", [("add", "{}")]),
    (
        "qwen3_coder",
        "<tool_call><function=weather><parameter=city>\nRome\n</para",
        "",
        [("weather", '{"city": "Rome')],
    ),
    ("qwen3_coder", "a <tool_call> <function> b", None, []),
    (
        "qwen3_coder",
        "So. <function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"
        "<function=now></function>.",
        "So..",
        [("add", '{"a": 1}'), ("now", "{}")],
    ),
    ("qwen3_coder", "a <function=b c> <function=", None, []),
    ("minimax_m2", "<minimax:tool_call>" + "\n" * 300 + '<invoke name="add">', None, []),
    (
        "qwen3_coder",
        "x <tool_call> y<tool_call><function=add></function></tool_call>",
        "x <tool_call> y",
        [("add", "{}")],
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n</function>\n"
        "</seed:tool_call>",
        "",
        [("weather", '{"city": "Rome"}')],
    ),
    (
        "glm45",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome\n</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>",
        "",
        [("weather", '{"city": "Rome\\n", "days": [1]}')],
    ),
    ("glm45", "<tool_call>other\n<arg_key>a</arg_key>", None, []),
    (
        "glm47",
        "<tool_call>weather<arg_key>near</arg_key><arg_value>none</arg_value></tool_call>"
        "<tool_call>time.now</tool_call>",
        "",
        [("weather", '{"near": "none"}'), ("time.now", "{}")],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n'
        '<parameter name="days">[2]</parameter>\n</invoke>\n<invoke name="time.now">\n</invoke>\n'
        "</minimax:tool_call>",
        "",
        [("weather", '{"city": "Rome", "days": [2]}'), ("time.now", "{}")],
    ),
    ("minimax_m2", "<minimax:tool_call><b>", None, []),
    (
        "lfm2",
        "So.<|tool_call_start|>[weather(city='Par<|tool_call_end|>', days=[1]), add(a=-1)]"
        "<|tool_call_end|>It is.",
        "So.It is.",
        [("weather", '{"city": "Par<|tool_call_end|>", "days": [1]}'), ("add", '{"a": -1}')],
    ),
    ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>", None, []),
    ("lfm2", "a <|tool_call_start|> b", None, []),
    (
        "lfm2",
        "<|tool_call_start|>no<|tool_call_start|>[now()]; or",
        "<|tool_call_start|>no; or",
        [("now", "{}")],
    ),
    (
        "olmo3",
        "<function_calls>\nweather(city='Rome')\n\nadd(a={'b': null})\n</function_calls>",
        "",
        [("weather", '{"city": "Rome"}'), ("add", '{"a": {"b": null}}')],
    ),
    ("olmo3", "<function_calls>\nadd(1)\n</function_calls>", None, []),
    ("olmo3", "<function_calls>\nadd(a=1)\nadd(a=", "", [("add", '{"a": 1}')]),
    (
        "gemma4",
        'So.\n<|tool_call>call:weather{city:<|"|>Par"is}<|"|>,near:none,<|"|>of day<|"|>:[1,'
        '{a:true,b:<|"|>x,<|"|>},[]],}<tool_call|><|tool_call>call:add{a:-1.5}<tool_call|>',
        "So.",
        [
            (
                "weather",
                '{"city": "Par\\"is}", "near": null, "of day": [1, {"a": true, "b": "x,"}, []]}',
            ),
            ("add", '{"a": -1.5}'),
        ],
    ),
    (
        "gemma4",
        "<|tool_call>call:add{,a:,b:so}<tool_call|>",
        "",
        [("add", '{"a": "", "b": "so"}')],
    ),
    ("gemma4", '<|tool_call>call:add{a:<|"|>b', "", [("add", '{"a": "b')]),
    ("gemma4", "<|tool_call>call:add{a:[1 }.", "}.", [("add", '{"a": [1]}')]),
    ("gemma4", "a <|tool_call> add{}", None, []),
    (
        "deepseek_v32",
        'I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="false">["Rome"]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="true">[1]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="near">no</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "I look.",
        [("weather", '{"city": ["Rome"], "days": "[1]", "near": "no"}')],
    ),
    ("required", '[{"name": "add", "parameters": {"a": 1}}]', "", [("add", '{"a": 1}')]),
    (
        "required",
        '[ {"name": "add", "parameters": {}} , {"name":"weather","parameters":{"a":"]"}} ] ',
        "",
        [("add", "{}"), ("weather", '{"a":"]"}')],
    ),
    ("required", "not held to it", None, []),
    ("required", '[{"na', None, []),
    ("named", ' {"a": 1}', "", [("add", '{"a": 1}')]),
    ("named", "", "", []),
]


def parser_of(name: str, parts: PartList) -> ToolParser:
    if name == "required":
        return RequiredParser(parts, KNOWN)
    if name == "named":
        return NamedParser(parts, "add")
    return PARSERS[name](parts, KNOWN)


def read(name: str, pieces: Sequence[str], limit: int | None = None) -> list[Part]:
    parser = parser_of(name, PartList(limit))
    parts = [part for piece in pieces for part in parser.push(piece)]
    return parts + parser.finish()


def added_up(parts: Sequence[Part]) -> tuple[str, list[tuple[str, str]]]:
    text, calls = "", list[tuple[str, str]]()
    for part in parts:
        match part:
            case Text():
                text += part.text
            case CallStart():
                assert part.index == len(calls)
                calls.append((part.name, ""))
            case CallArguments():
                assert part.index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return text, calls


def cut(text: str, places: Sequence[int]) -> list[str]:
    bounds = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


@pytest.mark.parametrize(("name", "text", "left", "calls"), CASES)
def test_calls_are_separated_from_text(
    name: str, text: str, left: str | None, calls: list[tuple[str, str]]
) -> None:
    expected = (text if left is None else left, calls)

    assert added_up(read(name, [text])) == expected
    assert added_up(read(name, list(text))) == expected


@pytest.mark.parametrize("name", PARSERS)
def test_a_stream_may_be_cut_at_every_place(name: str) -> None:
    text = EXAMPLES[name] + "\n"
    whole = added_up(read(name, [text]))

    assert [call for call, _ in whole[1]] == ["weather", "now"] and not whole[0].strip()
    for place in range(1, len(text)):
        assert added_up(read(name, [text[:place], text[place:]])) == whole


SHARDS = (
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "add<｜tool▁sep｜>",
    "<function=weather>",
    "<parameter=city>",
    "<parameter=days>",
    "</parameter>",
    "</function>",
    "<minimax:tool_call>",
    '<invoke name="weather">',
    '<parameter name="city">',
    "</invoke>",
    "<arg_key>city</arg_key>",
    "<arg_value>",
    "<|tool_call>call:add{",
    "<tool_call|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<function_calls>",
    "</function_calls>",
    '<|"|>',
    "a:",
    "</arg_value>",
    "[",
    "]",
    "add",
    "(",
    ")",
    "a=1",
    ", ",
    "; ",
    "'x'",
    '{"name": "add", "arguments": {"a": "b"}}',
    '{"name": "weather", "parameters": {}}',
    '{"name": ',
    '"add"',
    '"parameters": {',
    "}",
    "\\",
    '"',
    " \n",
    "text",
    "<",
)


@given(
    name=st.sampled_from((*PARSERS, "required", "named")),
    shards=st.lists(st.sampled_from(SHARDS), max_size=12),
    places=st.lists(st.integers(0, 400), max_size=12),
)
def test_the_parts_do_not_depend_on_how_the_text_is_split(
    name: str, shards: list[str], places: list[int]
) -> None:
    text = "".join(shards)
    whole = added_up(read(name, [text]))

    assert added_up(read(name, cut(text, places))) == whole
    assert added_up(read(name, list(text))) == whole


@given(
    arguments=st.dictionaries(
        st.text(max_size=8),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=12),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
            max_leaves=8,
        ),
        max_size=4,
    ),
    name=st.sampled_from(("hermes", "mistral", "llama3_json")),
    indent=st.sampled_from((None, 2)),
    places=st.lists(st.integers(0, 400), max_size=8),
)
def test_arguments_are_passed_on_unchanged(
    arguments: dict[str, object], name: str, indent: int | None, places: list[int]
) -> None:
    written = json.dumps(arguments, indent=indent)
    call = f'{{"name": "add", "arguments": {written}}}'
    text = {
        "hermes": f"<tool_call>\n{call}\n</tool_call>",
        "mistral": f"[TOOL_CALLS][{call}]",
        "llama3_json": call,
    }[name]

    assert added_up(read(name, cut(text, places))) == ("", [("add", written)])


def in_gemma(value: object) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case list():
            return f"[{','.join(map(in_gemma, value))}]"
        case dict():
            return f"{{{','.join(f'{key}:{in_gemma(each)}' for key, each in value.items())}}}"
    return json.dumps(value)


@given(
    arguments=st.dictionaries(
        st.text("abc_1", min_size=1, max_size=3),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=6),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", min_size=1), inner)
            ),
            max_leaves=6,
        ),
        max_size=3,
    ),
    places=st.lists(st.integers(0, 200), max_size=6),
)
@settings(deadline=None, max_examples=30)
def test_gemmas_notation_becomes_json(arguments: dict[str, object], places: list[int]) -> None:
    text = f"<|tool_call>call:add{in_gemma(arguments)}<tool_call|>"
    ((name, written),) = added_up(read("gemma4", cut(text, places)))[1]

    assert (name, json.loads(written)) == ("add", arguments)


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3_json"])
def test_arguments_are_passed_on_before_they_are_complete(name: str) -> None:
    incomplete = '{"name": "add", "parameters": {"text": "once upon'
    before = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS][", "llama3_json": ""}[name]
    parts = parser_of(name, PartList()).push(before + incomplete)

    assert parts == [CallStart(0, "add"), CallArguments(0, '{"text": "once upon')]


def test_text_is_held_back_only_while_it_may_begin_a_call() -> None:
    parser = parser_of("hermes", PartList())

    assert parser.push("a < b <tool") == [Text("a < b")]
    assert parser.push("box>") == [Text(" <toolbox>")]


def test_a_call_whose_name_comes_too_late_is_text() -> None:
    text = '<tool_call>{"arguments": {"a": "' + "b" * MAX_UNCERTAIN_CHARS + '"}, "name": "add"}'

    assert added_up(read("hermes", [text])) == (text, [])
    assert added_up(read("hermes", cut(text, range(0, len(text), 1000)))) == (text, [])


def test_a_recognised_call_may_be_long() -> None:
    arguments = '{"a": "' + "b" * MAX_UNCERTAIN_CHARS + '"}'
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'

    assert added_up(read("hermes", [text])) == ("", [("add", arguments)])


def test_with_a_limit_further_calls_are_left_out() -> None:
    text = f"<tool_call>{CALL}</tool_call>" * 3

    assert added_up(read("hermes", [text], limit=1)) == ("", [("weather", ARGUMENTS)])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ('{"name": function name, "parameters": dictionary of', "llama3_json"),
        ("[func_name1(params_name1=params_value1", "pythonic"),
        ("exact format: [func_name1(param1=value1)", "pythonic"),
        ("<tool_call><function=f>", None),
        ("<tool_call>\n<function=f>\n<parameter=a>", "qwen3_coder"),
        ("<seed:tool_call><function=f><parameter=a>", "seed_oss"),
        ("<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>", "glm45"),
        ("<tool_call>f<arg_key>k</arg_key><arg_value>", "glm47"),
        ("Answer with functools[{...}]", "phi4_mini_json"),
        ("{{ '<|tool_call|>' }}", "granite"),
        ("{{ '<|tool_call_start|>[' }}", "lfm2"),
        ("{{ '<function_calls>' }}", "olmo3"),
        ("{{ '<|tool_call>' + '<|\"|>' }}", "gemma4"),
        ("<TOOLCALL>[{...}]</TOOLCALL>", "nemotron_json"),
        ("<tool_calls>[{...}]</tool_calls>", "hunyuan_a13b"),
        ("<{{ token }}function_calls>｜DSML｜", "deepseek_v32"),
        ("<{{ token }}tool_calls>｜DSML｜", "deepseek_v4"),
        ('<minimax:tool_call><invoke name="f">', "minimax_m2"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<｜tool▁calls▁begin｜>function<｜tool▁sep｜>f\n```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "deepseek_v31"),
        ("{{ messages }}", None),
    ],
)
def test_the_format_is_found_in_the_template(template: str, name: str | None) -> None:
    assert detect_tool_parser(template) == name
