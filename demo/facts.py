"""Simple facts: days and months, colours, capitals, opposites, plurals, animals."""

import random
from typing import Any

from turns import Turn, article, capital, casual, listed, load

_TABLE: dict[str, Any] = load("facts")
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_MONTHS = (
    "January February March April May June July August September October November December"
).split()
_SEASONS = ("spring", "summer", "autumn", "winter")
_ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
).split()
_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_SEASON_OF = ("winter", "winter", *(season for season in _SEASONS for _ in range(3)), "winter")
_FLIES, _SWIMS = 5, 6


def calendar(rng: random.Random) -> list[Turn]:
    """Days, months and seasons."""
    return [rng.choice((_neighbour, _neighbour, _lengths, _ordinal, _whole))(rng)]


def _neighbour(rng: random.Random) -> Turn:
    kind, row = rng.choice((("day", _DAYS), ("month", _MONTHS), ("season", list(_SEASONS))))
    at = rng.randrange(len(row))
    if rng.random() < 0.6:
        ask = rng.choice(
            (f"What {kind} comes after {row[at]}?", f"Which {kind} comes after {row[at]}?")
        )
        return Turn(casual(rng, ask), f"After {row[at]} comes {row[(at + 1) % len(row)]}.")
    ask = rng.choice(
        (f"What {kind} comes before {row[at]}?", f"Which {kind} comes before {row[at]}?")
    )
    return Turn(casual(rng, ask), f"Before {row[at]} comes {row[at - 1]}.")


def _lengths(rng: random.Random) -> Turn:
    at = rng.randrange(12)
    if rng.random() < 0.4:
        return Turn(
            casual(rng, f"Which season is {_MONTHS[at]} in?"),
            f"In the north, {_MONTHS[at]} is in {_SEASON_OF[at]}.",
        )
    if at == 1:
        reply = "February has 28 days, and 29 in a leap year."
    else:
        reply = f"{_MONTHS[at]} has {_LENGTHS[at]} days."
    ask = rng.choice(
        (f"How many days does {_MONTHS[at]} have?", f"How many days are in {_MONTHS[at]}?")
    )
    return Turn(casual(rng, ask), reply)


def _ordinal(rng: random.Random) -> Turn:
    kind, whole, row = rng.choice((("day", "week", _DAYS), ("month", "year", _MONTHS)))
    at = rng.randrange(len(row))
    ask = rng.choice(
        (
            f"What is the {_ORDINALS[at]} {kind} of the {whole}?",
            f"Which {kind} is the {_ORDINALS[at]}?",
        )
    )
    return Turn(casual(rng, ask), f"The {_ORDINALS[at]} {kind} of the {whole} is {row[at]}.")


_WHOLES = (
    (
        (
            "Name the days of the week.",
            "What are the days of the week?",
            "List the days of the week.",
            "List the days.",
        ),
        f"{listed(_DAYS)}.",
    ),
    (
        (
            "Name the months of the year.",
            "What are the months?",
            "List the months.",
            "List all months of the year.",
        ),
        f"{listed(_MONTHS)}.",
    ),
    (
        (
            "Name the seasons.",
            "What are the four seasons?",
            "List the seasons.",
            "Which seasons are there?",
        ),
        "Spring, summer, autumn, winter.",
    ),
    (("How many days are in a week?", "How many days does a week have?"), "A week has seven days."),
    (
        ("How many months are in a year?", "How many months does a year have?"),
        "A year has twelve months.",
    ),
    (
        ("How many days are in a year?", "How long is a year?"),
        "A year has 365 days, and 366 in a leap year.",
    ),
    (("How many hours does a day have?", "How many hours are in a day?"), "A day has 24 hours."),
    (("How many minutes are in an hour?", "How long is an hour?"), "An hour has 60 minutes."),
    (("How many seconds are in a minute?", "How long is a minute?"), "A minute has 60 seconds."),
    (
        ("What are the days of the weekend?", "Which days are the weekend?"),
        "The weekend is Saturday and Sunday.",
    ),
)


def _whole(rng: random.Random) -> Turn:
    asks, reply = rng.choice(_WHOLES)
    return Turn(casual(rng, rng.choice(asks)), reply)


def world(rng: random.Random) -> list[Turn]:
    """Colours, capitals, opposites, plurals."""
    return [rng.choice((_colour, _capital_city, _capital_city, _opposite, _plural))(rng)]


def _colour(rng: random.Random) -> Turn:
    if rng.random() < 0.25:
        pair, mixed = rng.choice(list(_TABLE["mixing"].items()))
        ask = rng.choice((f"What do {pair} make?", f"What colour do you get when you mix {pair}?"))
        return Turn(casual(rng, ask), f"{capital(pair)} make {mixed}.")
    thing, colour = rng.choice(list(_TABLE["colours"].items()))
    ask = rng.choice(
        (f"What colour is {thing}?", f"Which colour does {thing} have?", f"What color is {thing}?")
    )
    return Turn(casual(rng, ask), f"{capital(thing)} is {colour}.")


def _capital_city(rng: random.Random) -> Turn:
    country, city = rng.choice(list(_TABLE["capitals"].items()))
    if rng.random() < 0.25:
        ask = rng.choice(
            (f"Which country has the capital {city}?", f"{city} is the capital of which country?")
        )
        return Turn(casual(rng, ask), f"{city} is the capital of {country}.")
    ask = rng.choice(
        (
            f"What is the capital of {country}?",
            f"What is the capital of {country}?",
            f"Which city is the capital of {country}?",
            f"Name the capital of {country}.",
            f"What's the capital of {country}?",
            f"The capital of {country}?",
        )
    )
    return Turn(casual(rng, ask), f"The capital of {country} is {city}.")


def _opposite(rng: random.Random) -> Turn:
    word, other = rng.choice(list(_TABLE["opposites"].items()))
    if rng.random() < 0.4 and other not in ("short", "white"):
        word, other = other, word
    ask = rng.choice(
        (
            f"What is the opposite of {word}?",
            f"Opposite of {word}?",
            f"Name the opposite of {word}.",
        )
    )
    return Turn(casual(rng, ask), f"The opposite of {word} is {other}.")


def _plural(rng: random.Random) -> Turn:
    word, plural = rng.choice(list(_TABLE["plurals"].items()))
    ask = rng.choice(
        (f"What is the plural of {word}?", f"Plural of {word}?", f"One {word}, two ...?")
    )
    return Turn(casual(rng, ask), f"One {word}, two {plural}.")


def animals(rng: random.Random) -> list[Turn]:
    """What animals are, do and eat, and which is bigger; with a follow-up about the same animal."""
    if rng.random() < 0.15:
        return [_bigger(rng)]
    name = rng.choice(list(_TABLE["animals"]))
    known = [kind for kind in (_kind, _legs, _sound, _young, _food, _can) if kind is not None]
    turns = [turn for ask in rng.sample(known, 4) if (turn := ask(rng, name)) is not None]
    return turns[: 2 if rng.random() < 0.2 else 1]


def _bigger(rng: random.Random) -> Turn:
    order = _TABLE["sizes"]["order"]
    small, big = sorted(rng.sample(range(len(order)), 2))
    pair = [order[small], order[big]]
    first, second = rng.sample(pair, 2)
    if rng.random() < 0.6:
        ask = rng.choice(("Which is bigger", "What is larger", "Which animal is bigger"))
        return Turn(
            casual(rng, f"{ask}, {first} or {second}?"),
            f"{capital(pair[1])} is bigger than {pair[0]}.",
        )
    return Turn(
        casual(rng, f"Which is smaller, {first} or {second}?"),
        f"{capital(pair[0])} is smaller than {pair[1]}.",
    )


def _kind(rng: random.Random, name: str) -> Turn | None:
    kind = _TABLE["animals"][name][0]
    guess = rng.choice((kind, rng.choice(("mammal", "bird", "fish", "insect"))))
    if rng.random() < 0.4:
        return Turn(
            casual(rng, f"What kind of animal is {article(name)}?"),
            f"{capital(article(name))} is {article(kind)}.",
        )
    answer = "Yes" if guess == kind else "No"
    return Turn(
        casual(rng, f"Is {article(name)} {article(guess)}?"),
        f"{answer}, {article(name)} is {article(kind)}.",
    )


def _legs(rng: random.Random, name: str) -> Turn | None:
    legs = _TABLE["animals"][name][1]
    return Turn(
        casual(rng, f"How many legs does {article(name)} have?"),
        f"{capital(article(name))} has {legs} legs.",
    )


def _sound(rng: random.Random, name: str) -> Turn | None:
    sound = _TABLE["animals"][name][2]
    ask = rng.choice((f"What sound does {article(name)} make?", f"What does {article(name)} say?"))
    return Turn(casual(rng, ask), f"{capital(article(name))} {sound}.") if sound else None


def _young(rng: random.Random, name: str) -> Turn | None:
    young = _TABLE["animals"][name][3]
    ask = rng.choice((f"What is a baby {name} called?", f"What do you call a young {name}?"))
    return Turn(casual(rng, ask), f"A young {name} is called {article(young)}.") if young else None


def _food(rng: random.Random, name: str) -> Turn | None:
    food = _TABLE["animals"][name][4]
    ask = rng.choice((f"What does {article(name)} eat?", f"What do you feed {article(name)}?"))
    return Turn(casual(rng, ask), f"{capital(article(name))} eats {food}.")


def _can(rng: random.Random, name: str) -> Turn | None:
    column, verb = rng.choice(((_FLIES, "fly"), (_SWIMS, "swim")))
    if _TABLE["animals"][name][column] == "yes":
        reply = f"Yes, {article(name)} can {verb}."
    else:
        reply = f"No, {article(name)} can not {verb}."
    return Turn(casual(rng, f"Can {article(name)} {verb}?"), reply)
