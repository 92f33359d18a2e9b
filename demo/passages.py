"""Sentences about people and things, with questions that they answer."""

import random

from turns import load

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
