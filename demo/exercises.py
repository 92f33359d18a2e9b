"""Exercises: sums, counting, lists of numbers and words, spelling, repeating."""

import random

from turns import Turn, article, casual, listed, load, spoken

LARGEST = 20  # largest number in a sum: a small model can learn these by heart
_TOO_LARGE = "That is too large for me. I can add and subtract up to 20 and multiply up to 10."
_DIGITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
).split()
_WORDS: dict[str, list[str]] = load("facts")["words"]
_ALL_WORDS = sorted({word for name in _WORDS for word in _WORDS[name]})
_COMMON = [word for word in _ALL_WORDS if word.islower()]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"

_SUM_PHRASES = {
    "+": ("{a} plus {b}", "the sum of {a} and {b}", "{a} and {b} together", "{a} + {b}"),
    "-": ("{a} minus {b}", "{a} less {b}", "{a} take away {b}", "{a} - {b}"),
    "*": (
        "{a} times {b}",
        "{a} multiplied by {b}",
        "the product of {a} and {b}",
        "{a} * {b}",
        "{a} x {b}",
    ),
    "/": ("{a} divided by {b}", "{a} / {b}"),
}
_SUM_QUESTIONS = (
    "What is {}?",
    "What is {}?",
    "How much is {}?",
    "Calculate {}.",
    "What's {}?",
    "{}",
    "{}?",
    "Can you calculate {}?",
    "Compute {}.",
    "Please calculate {}.",
    "{} = ?",
    "{} =",
    "Tell me what {} is.",
)


def sums(rng: random.Random) -> list[Turn]:
    """One to three sums with numbers that the model can learn."""
    kind = rng.random()
    if kind < 0.12:
        return [_word_problem(rng)]
    if kind < 0.2:
        return [_too_large(rng)]
    a, sign, b, result = _sum(rng)
    worked = f"{a} {sign} {b} = {result}"
    turns = [Turn(_ask_sum(rng, a, sign, b), f"{worked}.")]
    follow = rng.random()
    if follow < 0.08:
        turns.append(Turn(casual(rng, "Are you sure?"), f"Yes, {worked}."))
    elif follow < 0.2 and result <= LARGEST:
        more = rng.randint(1, 10)
        ask = rng.choice(
            (f"And {more} more?", f"Plus {more}?", f"Add {more}.", f"And plus {more}?")
        )
        turns.append(Turn(casual(rng, ask), f"{result} + {more} = {result + more}."))
    return turns


def _sum(rng: random.Random) -> tuple[int, str, int, int]:
    sign = rng.choice("++--**/")
    top = LARGEST if rng.random() < 0.6 else 10
    if sign == "+":
        a, b = rng.randint(0, top), rng.randint(0, top)
        return a, sign, b, a + b
    if sign == "-":
        a = rng.randint(0, top)
        b = rng.randint(0, a)
        return a, sign, b, a - b
    a, b = rng.randint(0, 10), rng.randint(1, 10)
    return (a, sign, b, a * b) if sign == "*" else (a * b, sign, b, a)


def _ask_sum(rng: random.Random, a: int, sign: str, b: int) -> str:
    question = rng.choice(_SUM_QUESTIONS)
    if rng.random() < 0.45:
        return question.format(f"{a} {sign} {b}" if rng.random() < 0.7 else f"{a}{sign}{b}")
    in_words = rng.random() < 0.25 and max(a, b) <= LARGEST
    shown = (_DIGITS[a], _DIGITS[b]) if in_words else (a, b)
    phrase = rng.choice(_SUM_PHRASES[sign]).format(a=shown[0], b=shown[1])
    return casual(rng, question.format(phrase))


def _too_large(rng: random.Random) -> Turn:
    sign = rng.choice("+-*/")
    large = rng.choice((rng.randint(101, 9999), rng.randint(101 if sign == "/" else 21, 999)))
    other = rng.choice((rng.randint(2, 20), rng.randint(21, 99), rng.randint(101, 9999)))
    a, b = (large, other) if sign == "/" or rng.random() < 0.5 else (other, large)
    return Turn(_ask_sum(rng, a, sign, b), _TOO_LARGE)


def _word_problem(rng: random.Random) -> Turn:
    name, thing = (
        rng.choice(_WORDS["names"]),
        rng.choice(("apples", "books", "coins", "eggs", "stones")),
    )
    a, b = rng.randint(1, 10), rng.randint(1, 10)
    if rng.random() < 0.5:
        gets = rng.choice(("gets {} more", "finds {} more", "buys {} more")).format(b)
        asked = f"{name} has {a} {thing} and {gets}. How many {thing} does {name} have now?"
        return Turn(asked, f"{a} + {b} = {a + b}, so {name} has {a + b} {thing} now.")
    a, b = max(a, b) + 1, min(a, b)
    loses = rng.choice(("gives {} away", "loses {}", "sells {}")).format(b)
    asked = f"{name} has {a} {thing} and {loses}. How many {thing} are left?"
    return Turn(asked, f"{a} - {b} = {a - b}, so {a - b} {thing} are left.")


def counting(rng: random.Random) -> list[Turn]:
    """Counting up, down and in steps, comparing, the number before and after."""
    return [rng.choice((_count, _count, _count_down, _steps, _compare, _neighbour))(rng)]


def _count(rng: random.Random) -> Turn:
    first = 1 if rng.random() < 0.6 else rng.randint(0, 15)
    last = rng.choice((10, 10, 5, 20, first + rng.randint(2, 12)))
    last = max(last, first + 2)
    reply = f"{listed(range(first, last + 1))}."
    asks = [f"Count from {first} to {last}.", f"Please count from {first} to {last}."]
    if first == 1:
        asks += [f"Count to {last}.", f"Can you count to {last}?", f"Count up to {last}."]
    asks.append(f"List the numbers from {first} to {last}.")
    return Turn(casual(rng, rng.choice(asks)), reply)


def _count_down(rng: random.Random) -> Turn:
    first = rng.choice((10, 5, rng.randint(4, 20)))
    asks = (
        f"Count down from {first}.",
        f"Count backwards from {first}.",
        f"Count from {first} to 1.",
    )
    return Turn(casual(rng, rng.choice(asks)), f"{listed(range(first, 0, -1))}.")


def _steps(rng: random.Random) -> Turn:
    kind, first = rng.choice((("even", 2), ("odd", 1)))
    last = rng.choice((10, 20, rng.randint(6, 20)))
    asks = (
        f"List the {kind} numbers up to {last}.",
        f"Which {kind} numbers are there up to {last}?",
    )
    return Turn(casual(rng, rng.choice(asks)), f"{listed(range(first, last + 1, 2))}.")


def _compare(rng: random.Random) -> Turn:
    a, b = rng.sample(range(100 if rng.random() < 0.5 else 21), 2)
    if rng.random() < 0.5:
        word = rng.choice(("bigger", "larger", "greater"))
        return Turn(
            casual(rng, f"Which is {word}, {a} or {b}?"), f"{max(a, b)} is {word} than {min(a, b)}."
        )
    return Turn(
        casual(rng, f"Which is smaller, {a} or {b}?"), f"{min(a, b)} is smaller than {max(a, b)}."
    )


def _neighbour(rng: random.Random) -> Turn:
    number = rng.randint(1, 99 if rng.random() < 0.5 else 20)
    if rng.random() < 0.6:
        ask = rng.choice((f"What comes after {number}?", f"Which number comes after {number}?"))
        return Turn(casual(rng, ask), f"After {number} comes {number + 1}.")
    ask = rng.choice((f"What comes before {number}?", f"Which number comes before {number}?"))
    return Turn(casual(rng, ask), f"Before {number} comes {number - 1}.")


def lists(rng: random.Random) -> list[Turn]:
    """Sorting and reversing lists, the largest, the first, how many; with a follow-up at times."""
    if rng.random() < 0.55:
        return _numbers(rng)
    return _words(rng)


def _shown(rng: random.Random, items: list[str]) -> str:
    return rng.choice((listed(items), listed(items), spoken(items), " ".join(items)))


def _numbers(rng: random.Random) -> list[Turn]:
    top = 99 if rng.random() < 0.4 else 20
    numbers = rng.sample(range(1, top + 1), rng.choice((3, 3, 4, 4, 5, 6)))
    shown = _shown(rng, [str(number) for number in numbers])
    up = sorted(numbers)
    kind = rng.random()
    if kind < 0.5:
        ask = rng.choice(
            (
                "Sort these numbers: {}",
                "Sort the numbers {}",
                "Sort {}",
                "Put these numbers in order: {}",
                "Please sort {}.",
                "Can you sort these numbers? {}",
                "Order these numbers: {}.",
            )
        )
        turns = [Turn(ask.format(shown), f"{listed(up)}.")]
        if rng.random() < 0.2:
            ask = rng.choice(("And backwards?", "Now the other way round.", "Now reverse it."))
            turns.append(Turn(casual(rng, ask), f"{listed(up[::-1])}."))
        return turns
    if kind < 0.62:
        ask = rng.choice(
            ("Sort from large to small: {}", "Sort these numbers in descending order: {}")
        )
        return [Turn(ask.format(shown), f"{listed(up[::-1])}.")]
    if kind < 0.74:
        return [Turn(f"Reverse this list: {shown}", f"{listed(numbers[::-1])}.")]
    word, number = ("largest", up[-1]) if rng.random() < 0.5 else ("smallest", up[0])
    return [Turn(f"Which number is the {word}: {shown}?", f"The {word} number is {number}.")]


def _words(rng: random.Random) -> list[Turn]:
    pool = _WORDS[rng.choice(("animals", "fruits", "things", "colours", "names", "headrace"))]
    words = rng.sample(pool, rng.choice((3, 3, 4, 4, 5)))
    shown = _shown(rng, words)
    kind = rng.random()
    if kind < 0.45:
        ask = rng.choice(
            (
                "Sort these words: {}",
                "Sort {}",
                "Put these words in alphabetical order: {}",
                "Sort alphabetically: {}",
                "Please sort these words: {}.",
                "Order these words: {}",
            )
        )
        return [Turn(ask.format(shown), f"{listed(sorted(words))}.")]
    if kind < 0.6:
        return [Turn(f"Reverse this list: {shown}", f"{listed(words[::-1])}.")]
    if kind < 0.7:
        return [
            Turn(f"How many words are these: {shown}?", f"These are {_DIGITS[len(words)]} words.")
        ]
    place, word = rng.choice((("first", words[0]), ("last", words[-1]), ("second", words[1])))
    return [Turn(f"What is the {place} word: {shown}?", f"The {place} word is {word}.")]


def spelling(rng: random.Random) -> list[Turn]:
    """Spelling, first and last letters, the alphabet, capitals."""
    word = rng.choice(_ALL_WORDS)
    kind = rng.random()
    if kind < 0.45:
        ask = rng.choice(
            (
                "Spell {}.",
                "How do you spell {}?",
                "Spell the word {}.",
                "Can you spell {}?",
                "How is {} spelled?",
            )
        )
        return [Turn(casual(rng, ask.format(word)), f"{'-'.join(word.lower())}.")]
    if kind < 0.6:
        ask = rng.choice(
            (
                "How many letters does {} have?",
                "How many letters are in {}?",
                "Count the letters of {}.",
            )
        )
        reply = f"{'-'.join(word.lower())}: that is {_DIGITS[len(word)]} letters."
        return [Turn(casual(rng, ask.format(word)), reply)]
    if kind < 0.8:
        place, letter = rng.choice((("first", word[0]), ("last", word[-1])))
        ask = rng.choice(("What is the {} letter of {}?", "Which is the {} letter of {}?"))
        return [
            Turn(
                casual(rng, ask.format(place, word)),
                f"The {place} letter of {word} is {letter.lower()}.",
            )
        ]
    return [_alphabet(rng)]


def _alphabet(rng: random.Random) -> Turn:
    if rng.random() < 0.2:
        ask = rng.choice(
            (
                "Say the alphabet.",
                "List the alphabet.",
                "What is the alphabet?",
                "Recite the alphabet.",
            )
        )
        return Turn(casual(rng, ask), f"{listed(_LETTERS)}.")
    at = rng.randrange(1, 25)
    if rng.random() < 0.6:
        return Turn(
            f"Which letter comes after {_LETTERS[at]}?",
            f"After {_LETTERS[at]} comes {_LETTERS[at + 1]}.",
        )
    return Turn(
        f"Which letter comes before {_LETTERS[at]}?",
        f"Before {_LETTERS[at]} comes {_LETTERS[at - 1]}.",
    )


def repeating(rng: random.Random) -> list[Turn]:
    """Repeating a phrase once or several times."""
    adjective = rng.choice(_WORDS["colours"])
    animal, thing = rng.choice(_WORDS["animals"]), rng.choice(_WORDS["things"])
    phrase = rng.choice(
        (
            listed(rng.sample(_COMMON, rng.randint(1, 4))),
            f"the {adjective} {animal} sees the {thing}",
            f"{article(animal)} in {article(adjective)} {thing}",
            f"I like the {adjective} {thing}.",
            f"{rng.choice(_WORDS['names'])} has {article(adjective)} {thing}.",
            rng.choice(_ALL_WORDS),
            f"{rng.randint(1, 99)} {animal}s and {rng.randint(1, 99)} {thing}s",
            " ".join(rng.sample(_COMMON, rng.randint(2, 6))),
        )
    )
    if rng.random() < 0.75:
        ask = rng.choice(
            ("Repeat: {}", "Say: {}", "Repeat after me: {}", "Please repeat: {}", 'Say "{}"')
        )
        return [Turn(ask.format(phrase), phrase)]
    word, times = rng.choice(_COMMON), rng.choice((2, 3, 3, 4, 5))
    shown = rng.choice((str(times), _DIGITS[times]))
    return [Turn(casual(rng, f"Say {word} {shown} times."), f"{listed([word] * times)}.")]
