"""Little stories from a grammar, with questions about them; jokes, riddles and poems."""

import random
from dataclasses import dataclass
from typing import Any

from turns import Turn, article, capital, casual, load

_STORIES: dict[str, Any] = load("stories")
_VERSE: dict[str, Any] = load("verse")
_SHE = (
    "Anna",
    "Carla",
    "Emma",
    "Grace",
    "Ida",
    "Kate",
    "Maria",
    "Nina",
    "Rosa",
    "Lily",
    "Mia",
    "Ella",
    "Zoe",
)
_HE = (
    "Ben",
    "David",
    "Felix",
    "Henry",
    "Jack",
    "Leo",
    "Oscar",
    "Paul",
    "Sam",
    "Tom",
    "Walter",
    "Max",
    "Noah",
)
_ASKS = (
    "Tell me a story{}.",
    "Tell me a story{}.",
    "Write a story{}.",
    "Tell me a short story{}.",
    "Can you tell me a story{}?",
    "Please tell me a story{}.",
    "I want to hear a story{}.",
    "Write a short story{}.",
    "Do you know a story{}?",
    "Tell a little story{}.",
    "A story{}, please.",
)
_ANOTHER = ("Another one, please.", "Tell me another story.", "One more!", "Another story, please.")


@dataclass(frozen=True)
class Story:
    """A story, with the facts that questions ask for."""

    hero: str
    name: str
    place: str
    friend: str
    plot: str
    text: str


def make_story(rng: random.Random) -> Story:
    """A new story: hero, name, place, helper and plot are drawn."""
    hero = rng.choice(_STORIES["heroes"])
    she = hero == "girl" or (hero != "boy" and rng.random() < 0.5)
    name = rng.choice(_SHE if she else _HE)
    pronouns = ("she", "her", "her") if she else ("he", "his", "him")
    friend, place = rng.choice(_STORIES["friends"]), rng.choice(_STORIES["places"])
    plot = rng.choice(_STORIES["plot"])
    lines = [_STORIES["openings"], *plot["steps"], _STORIES["endings"]]
    fields = {
        "name": name,
        "hero": hero,
        "place": place,
        "quality": rng.choice(_STORIES["qualities"]),
        "friend": friend,
        "Friend": capital(friend),
        "friend_the": f"the {friend.split(' ', 1)[1]}",
        "he": pronouns[0],
        "He": capital(pronouns[0]),
        "his": pronouns[1],
        "him": pronouns[2],
    }
    text = " ".join(rng.choice(ways).format(**fields) for ways in lines)
    return Story(hero, name, place, friend, plot["name"], text)


def stories(rng: random.Random) -> list[Turn]:
    """A request for a story, then questions about it or a request for a second one."""
    story = make_story(rng)
    about = rng.choice(
        (
            "",
            "",
            "",
            f" about {article(story.hero)}",
            f" about {article(story.hero)} named {story.name}",
            f" about {article(story.hero)} called {story.name}",
            f" about the {story.plot}",
            f" about {story.name}",
            f" with {article(story.hero)}",
        )
    )
    turns = [Turn(casual(rng, rng.choice(_ASKS).format(about)), story.text)]
    if rng.random() < 0.4:
        turns += rng.sample(_questions(story), rng.choice((1, 1, 2, 3)))
    elif rng.random() < 0.15:
        turns.append(Turn(casual(rng, rng.choice(_ANOTHER)), make_story(rng).text))
    return turns


def _questions(story: Story) -> list[Turn]:
    return [
        Turn(f"What was the {story.hero} called?", f"The {story.hero} was called {story.name}."),
        Turn(f"Where did {story.name} live?", f"{story.name} lived {story.place}."),
        Turn(f"Who helped {story.name}?", f"It was {story.friend}."),
        Turn(
            "What was the story about?", f"It was about {article(story.hero)} named {story.name}."
        ),
    ]


def verse(rng: random.Random) -> list[Turn]:
    """A joke, a riddle or a poem; at times a second one."""
    return rng.choice((_jokes, _riddles, _poems))(rng)


def _jokes(rng: random.Random) -> list[Turn]:
    asks = (
        "Tell me a joke.",
        "Do you know a joke?",
        "Make me laugh.",
        "A joke, please.",
        "Say something funny.",
    )
    first, second = rng.sample(_VERSE["jokes"], 2)
    turns = [Turn(casual(rng, rng.choice(asks)), first)]
    if rng.random() < 0.25:
        turns.append(
            Turn(casual(rng, rng.choice(("Another one.", "One more.", "Another joke!"))), second)
        )
    return turns


def _riddles(rng: random.Random) -> list[Turn]:
    asks = ("Tell me a riddle.", "Do you know a riddle?", "A riddle, please.", "Give me a riddle.")
    question, answer = rng.choice(_VERSE["riddles"]).split("? ")
    replies = ("I do not know.", "Tell me the answer.", "I give up.", "What is the answer?")
    return [
        Turn(casual(rng, rng.choice(asks)), f"{question}?"),
        Turn(casual(rng, rng.choice(replies)), f"The answer is: {answer[0].lower()}{answer[1:]}"),
    ]


def _poems(rng: random.Random) -> list[Turn]:
    about, text = rng.choice(list(_VERSE["poems"].items()))
    asks = (
        "Write a poem{}.",
        "Tell me a poem{}.",
        "Write a short poem{}.",
        "Do you know a poem{}?",
        "A poem{}, please.",
    )
    where = f" about {about}" if rng.random() < 0.8 else ""
    return [Turn(casual(rng, rng.choice(asks).format(where)), text)]
