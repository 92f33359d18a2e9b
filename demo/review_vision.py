"""Score what the vision demo model says about pictures that it was not trained on:
`python demo/review_vision.py common/headrace_common/demo_vision`."""

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from drawings import MOST_DIGITS, MOST_GROUPS, Picture, draw, draw_number, draw_shapes
from headrace_engine import LLM, SamplingParams
from picture_questions import ask, ask_nothing, describe
from turns import Turn

PER_KIND = 200
MAX_NEW_TOKENS = 48
Asked = tuple[Picture | None, Turn]
Make = Callable[[random.Random, int], Picture]


def kinds(per_kind: int) -> Mapping[str, Sequence[Asked]]:
    """Questions of each kind about unseen pictures."""
    found: dict[str, list[Asked]] = {}

    def add(name: str, make: Callable[[random.Random], Asked]) -> None:
        rng = random.Random(f"review {name}")
        found[name] = [make(rng) for _ in range(per_kind)]

    for count in range(1, MOST_GROUPS + 1):
        add(f"shapes, groups: {count}", partial(_described, _of_groups, count))
    for count in range(1, MOST_DIGITS + 1):
        add(f"numbers, digits: {count}", partial(_described, _of_digits, count))
    add("other questions", _asked)
    add("no picture", lambda rng: (None, ask_nothing(rng)))
    return found


def _described(make: Make, count: int, rng: random.Random) -> Asked:
    picture = make(rng, count)
    return picture, describe(rng, picture)


def _of_groups(rng: random.Random, count: int) -> Picture:
    while len((picture := draw_shapes(rng)).groups) != count:
        pass
    return picture


def _of_digits(rng: random.Random, count: int) -> Picture:
    return draw_number(rng, "".join(rng.choice("0123456789") for _ in range(count)))


def _asked(rng: random.Random) -> Asked:
    picture = draw(rng)
    while (turn := ask(rng, picture)).reply.startswith("I see"):
        pass
    return picture, turn


def answers(llm: LLM, asked: Sequence[Asked]) -> list[str]:
    """What the model says, greedily."""
    chats: list[Any] = []
    for picture, turn in asked:
        content: list[Any] = [{"type": "text", "text": turn.prompt}] if turn.prompt else []
        if picture is not None:
            content.insert(0, {"type": "image_pil", "image_pil": picture.image})
        chats.append([{"role": "user", "content": content}])
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS)
    outputs = llm.chat(chats, greedy, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def main() -> None:
    """Print how many answers of each kind are right, and some that are wrong."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model")
    parser.add_argument("--per-kind", type=int, default=PER_KIND)
    arguments = parser.parse_args()
    llm = LLM(arguments.model)
    for name, asked in kinds(arguments.per_kind).items():
        said = answers(llm, asked)
        pairs = list(zip(said, [turn.reply for _, turn in asked], strict=True))
        wrong = [pair for pair in pairs if pair[0] != pair[1]]
        print(f"{name}: {len(pairs) - len(wrong)} of {len(pairs)}")
        for text, right in wrong[:3]:
            print(f"    {text!r} instead of {right!r}")


if __name__ == "__main__":
    main()
