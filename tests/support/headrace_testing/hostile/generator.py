"""Draws random attacks: the same seed and number always give the same attack."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import expensive, http_attacks
from .attack import Attack, post
from .dice import Dice
from .document import BASES, Document
from .rows import CHAT, COMPLETIONS, as_format, ask, fields, form
from .sockets import many
from .values import draw_value
from .world import EMBEDDER

# Bytes that all copies of one attack send together.
MOST_BYTES = 32_000_000
_COPIES = (1, 1, 1, 2, 8)


class Generator:
    """Draws attacks on every field of the gateway's OpenAPI document."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._places = document.places
        self._kinds: Mapping[str, Callable[[Dice], Attack]] = {
            "field": self._field,
            "constraint": _constraint,
            "text": _text,
            "http": self._http,
            "counts": _counts,
            "lines": self._lines,
        }

    def draw(self, dice: Dice) -> Attack:
        """Draws an attack. Its name begins with the seed and number that repeat it."""
        kinds = ["field"] * 9 + ["constraint"] * 7 + ["text"] * 2 + ["http"] * 3
        kind = dice.pick("kind", [*kinds, "counts", "lines"], fixed=True)
        made = self._kinds[kind](dice)
        return Attack(f"{dice} {made.name}", made.client, made.play, made.spoils)

    def _field(self, dice: Dice) -> Attack:
        place = dice.pick("place", self._places)
        description, value = draw_value(dice, self._document.sample(place.schema))
        body = self._document.body(place, value)
        return _asked(dice, f"{place}: {description}", place.path, body)

    def _http(self, dice: Dice) -> Attack:
        return http_attacks.draw(dice, self._document.reads)

    def _lines(self, dice: Dice) -> Attack:
        """Uploads a batch file whose lines are not requests."""
        description, value = draw_value(dice, "x")
        line = b'{"custom_id":"a","method":"POST","url":"%b","body":%b}\n' % (CHAT.encode(), value)
        lines = {"a line": value, "a body": line, "lines": (value[:500] + b"\n") * 20_000}
        name = dice.pick("lines", list(lines))
        body, headers = form(lines[name])
        return Attack(
            f"a file with {name} of {description}",
            "tenant",
            lambda target: many(target.api, [post("/v1/files", body, target.attacker, headers)]),
        )


def _asked(dice: Dice, description: str, path: str, body: bytes) -> Attack:
    copies = min(dice.pick("copies", _COPIES), max(1, MOST_BYTES // max(1, len(body))))
    name = f"{description}, {copies} at once" if copies > 1 else description
    return Attack(name, "tenant", ask(path, body, copies))


def _constraint(dice: Dice) -> Attack:
    """Constrains an output by a grammar that may be expensive to compile."""
    kind = dice.pick("constraint", list(_CONSTRAINTS))
    path, more = _CONSTRAINTS[kind](dice)
    tokens = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 16}
    body = json.dumps({**BASES[path], **tokens, **more}).encode()
    return _asked(dice, f"{kind} of {len(body):,} bytes", path, body)


def _tool(schema: Any, strict: bool) -> dict[str, Any]:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
    return {"type": "function", "function": {**function, "strict": strict}}


_CONSTRAINTS: Mapping[str, Callable[[Dice], tuple[str, dict[str, Any]]]] = {
    "a schema": lambda dice: (CHAT, {"response_format": as_format(expensive.schema(dice))}),
    "a schema of a response": lambda dice: (
        "/v1/responses",
        {
            "text": {
                "format": {"type": "json_schema", "name": "x", "schema": expensive.schema(dice)}
            }
        },
    ),
    "a schema of a message": lambda dice: (
        "/v1/messages",
        {"output_config": {"format": {"type": "json_schema", "schema": expensive.schema(dice)}}},
    ),
    "strict tools": lambda dice: (
        CHAT,
        {"tools": [_tool(expensive.schema(dice), True)], "tool_choice": "auto"},
    ),
    "a forced tool": lambda dice: (
        CHAT,
        {"tools": [_tool(expensive.schema(dice), False)], "tool_choice": "required"},
    ),
    "an expression": lambda dice: (COMPLETIONS, {"guided_regex": expensive.pattern(dice)}),
    "a grammar": lambda dice: (
        COMPLETIONS,
        {"structured_outputs": {"grammar": expensive.grammar(dice)}},
    ),
    "a structural tag": lambda dice: (
        COMPLETIONS,
        {"structured_outputs": {"structural_tag": expensive.structural_tag(dice)}},
    ),
    "choices": lambda dice: (COMPLETIONS, {"guided_choice": expensive.choices(dice)}),
    "variables of the template": lambda dice: (
        CHAT,
        {"chat_template_kwargs": _variables(dice)},
    ),
}


def _variables(dice: Dice) -> dict[str, Any]:
    names = ("self", "messages", "tools", "loop", "namespace", "range", "caller", "eos_token", "x")
    count = dice.size("variables", 1, 20_000)
    values: Sequence[Any] = (1, [[]], "{{ 1 }}", {"a": {"b": 1}}, "x" * 100_000, None)
    value = dice.pick("variable", values)
    if isinstance(value, str) and len(value) * count > MOST_BYTES // 4:
        count = MOST_BYTES // 4 // len(value)
    return {names[i] if i < len(names) else f"v{i}": value for i in range(count)}


_LETTERS = (
    "a",
    " ",
    "\n",
    "ab ",
    "0",
    "é",
    "e\u0301\u0327",
    "你好",
    "\U0001f600",
    "<|im_end|>",
    "a'",
)


def _text(dice: Dice) -> Attack:
    """Sends long texts where a model reads them."""
    letters = dice.pick("letters", _LETTERS)
    size = dice.size("size", 10_000, 7_000_000)
    text = letters * (size // len(letters.encode()))
    halves = [text[: len(text) // 2]] * 2
    several = [text[:3_000]] * min(2_000, max(1, len(text) // 3_000))
    message = {"role": "user", "content": text}
    turns = [{"role": "user", "content": text[:20]}] * max(1, len(text) // 60)
    bodies: Mapping[str, tuple[str, dict[str, Any]]] = {
        "to tokenize": ("/tokenize", {"prompt": text}),
        "to complete": (COMPLETIONS, {"prompt": text}),
        "to complete, twice": (COMPLETIONS, {"prompt": halves}),
        "to embed": ("/v1/embeddings", {"input": text}),
        "to embed, in parts": ("/v1/embeddings", {"input": several, "model": EMBEDDER}),
        "to answer": (CHAT, {"messages": [message]}),
        "to answer, in turns": (CHAT, {"messages": turns}),
        "to count": ("/v1/messages/count_tokens", {"messages": [message]}),
        "as a response's input": ("/v1/responses", {"input": text}),
        "as a stop": (CHAT, {"stop": text}),
        "as many bad words": (CHAT, {"bad_words": [text[: len(text) // 250]] * 250}),
        "as many stops": (CHAT, {"stop": [f"{i}{text[:200]}" for i in range(2_000)]}),
    }
    name = dice.pick("where", list(bodies))
    path, more = bodies[name]
    return _asked(dice, f"{size:,} bytes of {letters!r} {name}", path, fields(path, **more))


def _counts(dice: Dice) -> Attack:
    """Sends numbers that multiply the cost of a request; small ones are allowed."""
    names = ("n", "best_of", "top_logprobs", "prompt_logprobs", "max_tokens", "min_tokens", "top_k")
    more: dict[str, Any] = {"stream": dice.pick("stream", [True, False]), "ignore_eos": True}
    for name in names:
        if dice.rng(f"{name}?").random() < 0.4:
            more[name] = dice.size(name, 1, dice.pick(f"{name} most", [20, 128, 10**6, 10**15]))
    more["logprobs"] = "top_logprobs" in more
    if dice.rng("beams").random() < 0.2:
        more["use_beam_search"] = True
    biases = dice.size("biases", 1, 1_500)
    more["logit_bias"] = {str(i): dice.pick("bias", [1, -100, 1e9]) for i in range(biases)}
    description = ", ".join(f"{name} {more[name]}" for name in names if name in more)
    return _asked(dice, f"counts: {description}, {biases} biases", CHAT, fields(CHAT, **more))
