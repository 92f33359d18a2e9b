"""Questions with fixed answers: the project, small talk, and what the model does not know."""

import random
from dataclasses import dataclass
from typing import Any

from turns import Turn, capital, casual, load, noisy

_PATTERNS = (
    "What is {}?",
    "What is {}?",
    "What is {}?",
    "What's {}?",
    "What does {} mean?",
    "Explain {}.",
    "Can you explain {}?",
    "Tell me about {}.",
    "What do you know about {}?",
    "Please explain {}.",
    "Define {}.",
    "What is meant by {}?",
    "How would you describe {}?",
    "What is {} in Headrace?",
    "Explain {} to me.",
    "I want to know what {} is.",
    "Do you know what {} is?",
    "{}?",
    "Describe {}.",
    "Explain {} in simple words.",
    "How does {} work?",
)
_HELD_OUT_PATTERN = "Could you tell me what {} is?"
_MORE = ("Tell me more.", "More, please.", "Go on.", "Can you tell me more?", "What else?")
_AGAIN = ("Please say that again.", "Say that again.", "Repeat that, please.", "What did you say?")
_NOISY = 0.3  # share of the prompts that are changed, so that the model relies on no single word
_NO_MORE = "That is all I know about it. You find more in the folder docs."


@dataclass(frozen=True)
class Topic:
    """One thing to know: the ways to ask for it and the answers, any of which is right."""

    training: tuple[str, ...]
    held_out: tuple[str, ...]
    answers: tuple[str, ...]
    more: str


def topics(name: str) -> list[Topic]:
    """The topics of `text/NAME.toml`."""
    return [_topic(entry) for entry in load(name)["topic"]]


def _topic(entry: dict[str, Any]) -> Topic:
    ask: list[str] = entry.get("ask", [])
    terms: list[str] = entry.get("terms", [])
    kept = ask[-1:] if len(ask) >= 5 else []
    training = ask[: len(ask) - len(kept)]
    phrased = [capital(pattern.format(term)) for term in terms for pattern in _PATTERNS]
    held_out = [*kept, *(_HELD_OUT_PATTERN.format(term) for term in terms[:1])]
    answer = entry["answer"]
    answers = (answer,) if isinstance(answer, str) else tuple(answer)
    # Whole questions fit a topic best, so they get the same weight as all phrased terms together.
    repeats = max(1, len(phrased) // max(1, len(training)))
    return Topic((*phrased, *training * repeats), tuple(held_out), answers, entry.get("more", ""))


@dataclass(frozen=True)
class Knowledge:
    """A source of turns about some topics, with follow-ups where `follow_up` says so."""

    topics: tuple[Topic, ...]
    follow_up: bool = True

    def __call__(self, rng: random.Random) -> list[Turn]:
        topic = rng.choice(self.topics)
        answer = rng.choice(topic.answers)
        prompt = casual(rng, rng.choice(topic.training))
        changed = noisy(rng, prompt) if rng.random() < _NOISY else prompt
        turns = [Turn(prompt if changed in topic.held_out else changed, answer)]
        if self.follow_up and rng.random() < 0.15:
            turns.append(Turn(casual(rng, rng.choice(_MORE)), topic.more or _NO_MORE))
        elif self.follow_up and rng.random() < 0.05:
            turns.append(Turn(casual(rng, rng.choice(_AGAIN)), answer))
        return turns


def unknown(rng: random.Random) -> list[Turn]:
    """A question that only a larger model can answer."""
    table = load_unknown()
    kind = rng.random()
    if kind < 0.25:
        prompt = rng.choice(table["others"])
    elif kind < 0.4:
        prompt = rng.choice(table["requests"]).format(task=rng.choice(table["tasks"]))
    else:
        topic, other = rng.sample(table["topics"], 2)
        if kind > 0.8:
            topic = _invented(rng)
        prompt = rng.choice(table["questions"]).format(topic=topic, other=other)
    return [Turn(casual(rng, prompt), rng.choice(table["answers"]))]


_UNKNOWN = load("unknown")


def load_unknown() -> dict[str, list[str]]:
    """The table of what the model does not know."""
    return _UNKNOWN


def _invented(rng: random.Random) -> str:
    """An invented word. With it the model learns to say of unknown words that it does not know."""
    syllables = (rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(3))
    word = "".join(syllables) + rng.choice(("", "n", "r", "st", "x", "ll"))
    return capital(word) if rng.random() < 0.3 else word
