"""Requests that must be refused, each by name: what attackers and careless clients send."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .checkpoints import VOCAB
from .single import CONTEXT
from .stack import MODEL

_PROMPT = b'"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4'


COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class BadBody:
    """A request that must be refused.

    `body` is bytes, or fields that are sent as JSON; a field may be a function that makes a large
    value. `param` is the field that the error must name, if any. `status` is the answer's status;
    None allows any 4xx.
    """

    name: str
    body: bytes | Mapping[str, Any]
    param: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    path: str = COMPLETIONS
    status: int | None = None

    @property
    def content(self) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        return json.dumps(self.body, default=lambda make: make()).encode()


def bad_bodies() -> list[BadBody]:
    """Bad bodies: prompts and counts, sampling numbers, token lists, grammars, chats, paths."""
    return [
        *_malformed(),
        *_prompts(),
        *_numbers(),
        *_lists(),
        *_grammars(),
        *_chats(),
        *_refused_paths(),
    ]


def _completion(name: str, param: str | None = None, **fields: Any) -> BadBody:
    body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, **fields}
    return BadBody(name, body, param)


def _raw(field: str, literal: str) -> BadBody:
    content = b'{%b, "%b": %b}' % (_PROMPT, field.encode(), literal.encode())
    return BadBody(f"{field} {literal}", content)


def _malformed() -> list[BadBody]:
    nested = b'{%b, "x": %b1%b}' % (_PROMPT, b"[" * 100_000, b"]" * 100_000)
    return [
        BadBody("empty", b""),
        BadBody("not json", b"prompt=hello"),
        BadBody("cut short", b'{"model": "tiny", "prompt": "he'),
        BadBody("not an object", b"[1, 2]"),
        BadBody("invalid utf-8", b'{"model": "tiny", "prompt": "\xff\xfe"}'),
        BadBody("half a surrogate", b'{"model": "tiny", "prompt": "\\ud800"}'),
        BadBody("deep nesting", nested),
        BadBody("over the limit", b'{"prompt": "%b"}' % (b"a" * 9 * 2**20)),
        BadBody("gzip", b"\x1f\x8b\x08", headers=(("content-encoding", "gzip"),)),
        BadBody("form", b"a=1", headers=(("content-type", "application/x-www-form-urlencoded"),)),
        BadBody("huge header", b"{}", headers=(("x-pad", "a" * 100_000),)),
    ]


def _prompts() -> list[BadBody]:
    bodies = [
        _completion("no prompt", "prompt", prompt=None),
        _completion("very many prompts", "prompt", prompt=["a"] * 200_000),
        _completion("a million prompts", prompt=["a"] * 1_000_000),
        _completion("id below zero", "prompt", prompt=[5, -1]),
        _completion("id at the vocabulary's size", "prompt", prompt=[5, VOCAB]),
        _completion("id of 64 bits", "prompt", prompt=[2**63]),
        _completion("fraction of an id", "prompt", prompt=[5, 1.5]),
        _completion("true as an id", "prompt", prompt=[True]),
        _completion("empty text", "prompt", prompt=""),
        _completion("no prompts", "prompt", prompt=[]),
        _completion("empty ids", "prompt[0]", prompt=[[]]),
        _completion("ids beside text", "prompt[1]", prompt=["a", [5]]),
        _completion("an object", "prompt", prompt={"a": 1}),
        _completion("longer than the context", prompt=[5] * (CONTEXT + 1)),
        _completion("context exceeded by one", prompt=[5] * (CONTEXT - 3)),
    ]
    for value in (0, -1, 2**63, 1.5, "4", True):
        bodies.append(_completion(f"max_tokens {value!r}", "max_tokens", max_tokens=value))
    for name in ("n", "best_of"):
        for value in (0, -1, 10**9, 2**64, "2"):
            bodies.append(_completion(f"{name} {value!r}", name, **{name: value}))
    return bodies


def _numbers() -> list[BadBody]:
    numbers = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
    bodies = [_raw(name, word) for name in numbers for word in ("NaN", "Infinity", "-Infinity")]
    for name in (*numbers, "repetition_penalty"):
        low = -3 if "penalty" in name else -1
        unfit: tuple[object, ...] = (low, 1e308, "1", True, [])
        for value in unfit:
            bodies.append(_completion(f"{name} {value!r}", name, **{name: value}))
    for name, values in {
        "top_k": (-5, 2**31, 1.5),
        "seed": (2**63, -(2**63) - 1, 10**30, 1.5),
        "min_tokens": (-1, 5, 2**63),
        "priority": (2**31, 0.5),
        "logprobs": (-1, 21, 10**6, True),
    }.items():
        for number in values:
            bodies.append(_completion(f"{name} {number!r}", name, **{name: number}))
    return bodies


def _lists() -> list[BadBody]:
    return [
        _completion("bias of no token", "logit_bias", logit_bias={str(VOCAB): 1}),
        _completion("bias below zero", "logit_bias", logit_bias={"-1": 1}),
        _completion("bias of a word", "logit_bias", logit_bias={"a": 1}),
        _completion("bias too strong", "logit_bias", logit_bias={"5": 1e6}),
        _completion("bias is not a number", "logit_bias", logit_bias={"5": "1"}),
        _completion("very many biases", "logit_bias", logit_bias=lambda: _biases(50_000)),
        _completion("more biases", logit_bias=lambda: _biases(500_000)),
        _completion("stop at no token", "stop_token_ids", stop_token_ids=[VOCAB]),
        _completion("stop below zero", "stop_token_ids", stop_token_ids=[-1]),
        _completion(
            "a million stop ids", "stop_token_ids", stop_token_ids=lambda: list(range(10**6))
        ),
        _completion("very many stops", "stop", stop=["x"] * 10_000),
        _completion("a long stop", "stop", stop="x" * 2**20),
        _completion("an empty stop", "stop", stop=[""]),
        _completion("unknown field", "no_such_field", no_such_field=1),
        _completion("unsupported field", "suffix", suffix="x"),
        _completion("unknown model", "model", model="x" * 100_000),
    ]


def _biases(count: int) -> dict[str, int]:
    return {str(token): 1 for token in range(count)}


def _grammars() -> list[BadBody]:
    deep = b'{"not":' * 10_000 + b"{}" + b"}" * 10_000
    formats: dict[str, object] = {
        "no schema": {"type": "json_schema"},
        "unknown kind of format": {"type": "yaml"},
        "unknown type in a schema": _json_schema({"type": "nonsense"}),
        "schema that is not an object": _json_schema([1, 2]),
        "remote reference": _json_schema({"$ref": "http://169.254.169.254/latest"}),
        "reference to nothing": _json_schema({"$ref": "#/$defs/none"}),
        "very many properties": _json_schema(
            {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(20_000)}}
        ),
    }
    guided: dict[str, tuple[str, object]] = {
        "broken regex": ("guided_regex", "(("),
        "long regex": ("guided_regex", "a" * 1_000_000),
        "broken grammar": ("guided_grammar", "root ::= ((("),
        "no choices": ("guided_choice", []),
        "very many choices": ("guided_choice", ["a"] * 200_000),
        "choice that is not text": ("guided_choice", [1]),
    }
    return [
        *(_completion(name, "response_format", response_format=v) for name, v in formats.items()),
        *(_completion(name, field, **{field: v}) for name, (field, v) in guided.items()),
        BadBody("endless regex", _raw("guided_regex", f'"{"(a{1,1000}){1,1000}" * 50}"').content),
        BadBody("very deep schema", b'{%b, "guided_json": %b}' % (_PROMPT, deep)),
        _completion("two constraints", guided_regex="a", guided_choice=["a"]),
    ]


def _json_schema(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def _chats() -> list[BadBody]:
    fields: list[tuple[str, str, dict[str, Any]]] = [
        ("no messages", "messages", {"messages": []}),
        ("messages of text", "messages", {"messages": "x"}),
        ("unknown role", "messages[0].role", {"messages": [{"role": "wizard", "content": "x"}]}),
        ("message of nothing", "messages[0]", {"messages": [{"role": "user"}]}),
        (
            "number as content",
            "messages[0].content",
            {"messages": [{"role": "user", "content": 5}]},
        ),
        ("empty chat", "messages", {"messages": [{"role": "user", "content": ""}]}),
        (
            "chat longer than the context",
            "messages",
            {"messages": [{"role": "user", "content": "a " * CONTEXT}]},
        ),
        ("n 10^9", "n", {"n": 10**9}),
        ("top_logprobs alone", "top_logprobs", {"top_logprobs": 5}),
        ("top_logprobs 10^6", "top_logprobs", {"logprobs": True, "top_logprobs": 10**6}),
        ("max_completion_tokens 2^63", "max_completion_tokens", {"max_completion_tokens": 2**63}),
        ("template of the client's", "chat_template", {"chat_template": "{{ 1 }}"}),
    ]
    base = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    return [
        BadBody(f"chat: {name}", {**base, **more}, param, path=CHAT) for name, param, more in fields
    ]


def _refused_paths() -> list[BadBody]:
    paths = ("/update_weights", "/admin", "/v1/../../etc/passwd")
    return [
        *(BadBody(f"path {path}", b"{}", path=path, status=404) for path in paths),
        BadBody("adapter that is not allowed", b"{}", path="/v1/load_lora_adapter", status=403),
    ]
