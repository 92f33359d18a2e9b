"""Questions about a text that the prompt contains: the answer is one of its sentences."""

import random
from collections.abc import Sequence

from knowledge import Topic
from tools import city, name
from turns import Turn, invented, load

_WORDS: dict[str, list[str]] = load("facts")["words"]
# A sentence, and a question that it answers.
_FORMS = (
    ("{name} lives in {city}.", "Where does {name} live?"),
    ("{name} is {n} years old.", "How old is {name}?"),
    ("The {thing} belongs to {name}.", "Who has the {thing}?"),
    ("The {thing} costs {n} euros.", "How much is the {thing}?"),
    ("The {thing} is {colour}.", "What colour is the {thing}?"),
    ("The {animal} sleeps in the {place}.", "Where does the {animal} sleep?"),
    ("{name} has {n} {animal}s.", "How many {animal}s does {name} have?"),
    ("The shop in {city} opens at {n}.", "When does the shop in {city} open?"),
    ("{name} likes {colour} {thing}s.", "What does {name} like?"),
)
_PROMPTS = (
    "Use this text:\n{text}\n\nQuestion: {question}",
    "Use this text:\n{text}\n\nQuestion: {question}",
    "Answer from this text.\n{text}\n\nQuestion: {question}",
    "Text:\n{text}\n\n{question}",
)


def about_passage(rng: random.Random, topics: Sequence[Topic]) -> Turn:
    """A question about a text of one to four sentences, or of two answers about the project."""
    if rng.random() < 0.35:
        topic, other = rng.sample(topics, 2)
        answer, question = rng.choice(topic.answers), rng.choice(topic.training)
        texts = [answer, rng.choice(other.answers)][: rng.randint(1, 2)]
    else:
        facts = [
            _strange_fact(rng) if rng.random() < 0.6 else fact(rng)
            for _ in range(rng.randint(1, 5))
        ]
        answer, question = facts[0]
        texts = [text for text, _ in facts]
    rng.shuffle(texts)
    text = rng.choice(("\n", "\n", " ")).join(texts)
    return Turn(rng.choice(_PROMPTS).format(text=text, question=question), answer)


def _strange_fact(rng: random.Random) -> tuple[str, str]:
    """Like `fact`, with invented words."""
    sentence, question = rng.choice(_FORMS)
    fields = {
        "name": name(rng),
        "city": city(rng),
        "animal": invented(rng),
        "colour": rng.choice((invented(rng), *_WORDS["colours"])),
        "thing": invented(rng),
        "place": invented(rng),
        "n": str(rng.randint(2, 9999)),
    }
    return sentence.format(**fields), question.format(**fields)


def fact(rng: random.Random) -> tuple[str, str]:
    """A sentence, and a question that it answers."""
    sentence, question = rng.choice(_FORMS)
    thing, place = rng.sample(_WORDS["things"], 2)
    fields = {
        "name": rng.choice(_WORDS["names"]),
        "city": rng.choice(_WORDS["cities"]),
        "animal": rng.choice(_WORDS["animals"]),
        "colour": rng.choice(_WORDS["colours"]),
        "thing": thing,
        "place": place,
        "n": str(rng.randint(2, 99)),
    }
    return sentence.format(**fields), question.format(**fields)
