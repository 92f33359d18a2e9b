"""Thinking before an answer: sums by columns, sorting step by step, letters one by one.

With a low effort the model notes what it needs; with a high effort it writes each step and checks.
"""

import random
import re
from collections.abc import Callable

from turns import Turn, casual, listed, load

LOW, HIGH = "low", "high"
_WORDS: dict[str, list[str]] = load("facts")["words"]
_ALL_WORDS = sorted({word for name in _WORDS for word in _WORDS[name] if word.isalpha()})
_ASK_SUM = (
    "What is {}?",
    "What is {}?",
    "How much is {}?",
    "Calculate {}.",
    "{}",
    "{} = ?",
    "Work out {}.",
    "What's {}?",
)
_SUM = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)\.")
_CUT_SHARE = 0.04  # share of the thoughts that are cut off, as a token budget would do


def reasoned(rng: random.Random, effort: str, plain: Callable[[], Turn]) -> Turn:
    """A question with thoughts of this effort; `plain` draws questions without thoughts."""
    kind = rng.random()
    if kind < 0.4:
        turn = _columns(rng, effort)
    elif kind < 0.55:
        turn = _sorting(rng, effort)
    elif kind < 0.65:
        turn = _letters(rng, effort)
    else:
        turn = recalled(plain(), effort)
    if rng.random() < _CUT_SHARE:
        words = turn.reasoning.split(" ")
        turn = turn._replace(reasoning=" ".join(words[: rng.randint(1, len(words))]))
    return turn


def about_tool(turn: Turn, tool: str, effort: str) -> Turn:
    """The turn with thoughts about this tool: before its call, or about its result."""
    if turn.role == "tool":
        low, high = (
            f"The result is {turn.prompt}.",
            f"The tool {tool} gave {turn.prompt}.\nI tell it the user.",
        )
    else:
        low, high = (
            f"I use {tool}.",
            f"The user writes: {turn.prompt}\nThe tool {tool} fits. I call it.",
        )
    return turn._replace(reasoning=high if effort == HIGH else low)


def about_json(turn: Turn, effort: str) -> Turn:
    """The turn with thoughts about an answer in JSON."""
    high = f"The user writes: {turn.prompt}\nI answer in JSON."
    return turn._replace(reasoning=high if effort == HIGH else "I answer in JSON.")


def _columns(rng: random.Random, effort: str) -> Turn:
    """A sum of two numbers below 100, by tens and ones."""
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    add = rng.random() < 0.6
    if not add:
        a, b = max(a, b), min(a, b)
    sign, result = ("+", a + b) if add else ("-", a - b)
    shown = f"{a} {sign} {b}"
    words = f"{a} {'plus' if add else 'minus'} {b}"
    asked = rng.choice((shown, shown, words, f"{a}{sign}{b}"))
    tens, ones = b - b % 10, b % 10
    half = a + tens if add else a - tens
    steps = f"{a} {sign} {tens} = {half}. {half} {sign} {ones} = {result}."
    if b < 10:
        steps = f"{shown} = {result}."
    if effort == HIGH:
        check = f"{result} {'-' if add else '+'} {b} = {a}"
        parts = f"I take {b} as {tens} and {ones}. " if b > 9 else ""
        steps = f"The user wants {shown}.\n{parts}{steps}\nCheck: {check}. The result is {result}."
    prompt = casual(rng, rng.choice(_ASK_SUM).format(asked))
    return Turn(prompt, f"{shown} = {result}.", reasoning=steps)


def _sorting(rng: random.Random, effort: str) -> Turn:
    if rng.random() < 0.6:
        top = rng.choice((20, 99))
        items = [str(number) for number in rng.sample(range(1, top + 1), rng.choice((3, 4, 5, 6)))]
        ordered = sorted(items, key=int)
        ask, word = "Sort these numbers: {}", "smallest"
    else:
        pool = _WORDS[rng.choice(("animals", "fruits", "things", "names"))]
        items = rng.sample(pool, rng.choice((3, 4, 5)))
        ordered = sorted(items)
        ask, word = "Sort these words: {}", "first"
    ask = rng.choice((ask, ask, "Sort {}", "Please sort {}."))
    reasoning = f"In order: {listed(ordered)}."
    if effort == HIGH:
        left, lines = list(items), []
        for item in ordered[:-1]:
            left.remove(item)
            lines.append(f"The {word} is {item}. Left: {listed(left)}.")
        reasoning = "The user wants a list in order.\n" + "\n".join(lines)
    return Turn(ask.format(listed(items)), f"{listed(ordered)}.", reasoning=reasoning)


def _letters(rng: random.Random, effort: str) -> Turn:
    word = rng.choice(_ALL_WORDS).lower()
    ask = rng.choice(("How many letters does {} have?", "Count the letters of {}."))
    numbered = ", ".join(f"{letter} {at}" for at, letter in enumerate(word, 1))
    reasoning = f"{numbered}."
    if effort == HIGH:
        reasoning = (
            f"The word is {word}.\nI count its letters: {numbered}.\n"
            f"The last number is {len(word)}."
        )
    return Turn(
        casual(rng, ask.format(word)), f"{word} has {len(word)} letters.", reasoning=reasoning
    )


def recalled(turn: Turn, effort: str) -> Turn:
    """Thoughts about a question whose answer needs no steps."""
    worked = _SUM.fullmatch(turn.reply)
    if worked:
        a, sign, b, result = worked.groups()
        low = f"{a} {sign} {b} = {result}."
        back = {"+": "-", "-": "+", "*": "/", "/": "*"}[sign]
        check = f" Check: {result} {back} {b} = {a}." if b != "0" else ""
        high = f"The user wants {a} {sign} {b}.\n{low}{check}"
    else:
        low = "I can answer this at once."
        high = (
            f"The user writes: {turn.prompt}\nI need no steps for this.\nI answer in a few words."
        )
    return turn._replace(reasoning=high if effort == HIGH else low)
