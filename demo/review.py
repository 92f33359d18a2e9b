"""Show and score what a trained demo model says: `python demo/review.py MODEL_FOLDER`."""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from dialogues import AGENT_KINDS, Dialogue, Probe, agent_dialogues, probes
from promises import PROMISES
from schemas import is_told
from tools import definition

PER_KIND = 30
MAX_NEW_TOKENS = 220
_TOGETHER = 30  # prompts in a batch
CONVERSATIONS = (
    ("Hello!", "My name is Tom.", "What is 7 + 8?", "What is my name?", "Thanks, bye!"),
    (
        "What is Headrace?",
        "Tell me more.",
        "And how do I install it?",
        "How do I use my own model?",
    ),
    ("Tell me a story about a fox named Max.", "What was the fox called?", "Another one, please."),
    (
        "Sort these words: pear, apple, fig",
        "Spell banana.",
        "What is a KV cache?",
        "who was Goethe?",
    ),
)


class Talker:
    """Generates a model's replies in float32, with its chat template."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, padding_side="left"
        )
        self._model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def replies(self, chats: list[list[dict[str, str]]], temperature: float = 0.0) -> list[str]:
        """One reply per chat; a reply that does not end by itself gets three dots."""
        return self._continued([self.prompt(chat) for chat in chats], temperature)

    def answers(self, dialogues: Sequence[Dialogue]) -> list[str]:
        """What the model says in place of each dialogue's last reply, thoughts included.

        If a grammar writes parts of a reply, the model is given those parts.
        """
        plain = [dialogue for dialogue in dialogues if not dialogue.turns[-1].given]
        said = iter(self._continued(list(map(self.begun, plain))) if plain else [])
        return [
            self._filled(dialogue) if dialogue.turns[-1].given else next(said)
            for dialogue in dialogues
        ]

    def begun(self, dialogue: Dialogue) -> str:
        """The prompt for a dialogue's last reply."""
        system = [{"role": "system", "content": dialogue.system}] if dialogue.system else []
        chat = [*system, *(message for turn in dialogue.turns for message in turn.messages)]
        effort = {"reasoning_effort": dialogue.effort} if dialogue.effort else {}
        return self.prompt(chat[:-1], tools=list(map(definition, dialogue.tools)), **effort)

    def _filled(self, dialogue: Dialogue) -> str:
        """A reply with given tokens, as a grammar forces them; the others are decoded greedily."""
        reply = dialogue.turns[-1].reply
        prompt = self._tokenizer(self.begun(dialogue))["input_ids"]
        wanted = self._tokenizer(reply, return_offsets_mapping=True)
        ids = torch.tensor([prompt + wanted["input_ids"]])
        with torch.no_grad():
            likeliest = self._model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
        spans = dialogue.turns[-1].given
        text = ""
        for token, guess, (first, last) in zip(
            wanted["input_ids"], likeliest, wanted["offset_mapping"], strict=True
        ):
            forced = any(begin < last and first < end for begin, end in spans)
            text += str(self._tokenizer.decode([token if forced else guess]))
            if not forced and guess != token:
                return text + " ..."
        return text

    def _continued(self, prompts: list[str], temperature: float = 0.0) -> list[str]:
        order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
        said = [""] * len(prompts)
        for first in range(0, len(order), _TOGETHER):
            group = order[first : first + _TOGETHER]
            texts = self._group([prompts[at] for at in group], temperature)
            for at, text in zip(group, texts, strict=True):
                said[at] = text
        return said

    def _group(self, prompts: list[str], temperature: float) -> list[str]:
        inputs = self._tokenizer(prompts, return_tensors="pt", padding=True)
        with torch.no_grad():
            ids = self._model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=temperature > 0,
                temperature=temperature or 1.0,
            )
        return [self._text(row) for row in ids[:, inputs["input_ids"].shape[1] :].tolist()]

    def prompt(self, chat: list[dict[str, str]], **variables: Any) -> str:
        """The chat as the chat template writes it."""
        template = self._tokenizer.apply_chat_template
        return str(template(chat, tokenize=False, add_generation_prompt=True, **variables))

    def _text(self, ids: list[int]) -> str:
        text = str(self._tokenizer.decode(ids, skip_special_tokens=True))
        return text if self._tokenizer.eos_token_id in ids else text + " ..."


def score(talker: Talker, wanted: list[Probe]) -> Counter[str]:
    """Counts the probes of each kind that greedy decoding answers right; prints the wrong
    answers."""
    right: Counter[str] = Counter()
    replies = talker.replies([[{"role": "user", "content": probe.prompt}] for probe in wanted])
    for probe, reply in zip(wanted, replies, strict=True):
        right[probe.kind] += reply in probe.accepted
        if reply not in probe.accepted:
            print(f"  {probe.kind}: {probe.prompt!r} -> {reply!r}")
    return right


def agent_score(talker: Talker, per_kind: int) -> Counter[str]:
    """Counts the dialogues of each kind whose last reply is right; prints the wrong ones.

    A call is right if its name and arguments are; JSON if its values are; the answer after thoughts
    if it is the expected one; thoughts do not count.
    """
    right: Counter[str] = Counter()
    for kind in AGENT_KINDS:
        wanted = agent_dialogues(kind, per_kind, seed=7)
        for dialogue, said in zip(wanted, talker.answers(wanted), strict=True):
            reply, expected = answer_of(said), dialogue.turns[-1].reply
            good = reply == expected or same_data(kind, reply, expected, dialogue)
            right[kind] += good
            if not good:
                print(f"  {kind}: {dialogue.turns[-1].prompt!r} -> {said!r} for {expected!r}")
    return right


def answer_of(said: str) -> str:
    """The text after the thoughts."""
    return said.rpartition("</think>")[2].lstrip("\n")


def same_data(kind: str, reply: str, expected: str, dialogue: Dialogue) -> bool:
    """Whether two calls or JSON texts have the same data; for made-up values, the same names."""
    if kind not in ("calls", "json"):
        return False
    try:
        said, wanted = _data(reply), _data(expected)
    except ValueError:
        return False
    if kind == "json" and not is_told(dialogue.turns[-1]):
        return bool(_shape(said) == _shape(wanted))
    return said == wanted


def _data(text: str) -> list[Any]:
    """The JSON of a text: of each call, or of all of it."""
    parts = text.replace("</tool_call>", "").split("<tool_call>")
    return [json.loads(part) for part in parts if part.strip()]


def _shape(data: Any) -> Any:
    """The names and types of the values."""
    if isinstance(data, dict):
        return {key: _shape(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_shape(value) for value in data[:1]]
    return type(data)


def promises_score(talker: Talker) -> int:
    """Counts the prompts that are answered as the documentation shows; prints the others."""
    right = 0
    replies = talker.answers([dialogue for dialogue, _ in PROMISES])
    for (dialogue, expected), said in zip(PROMISES, replies, strict=True):
        right += answer_of(said) == expected
        if answer_of(said) != expected:
            print(f"  promise: {dialogue.turns[-1].prompt!r} -> {said!r} for {expected!r}")
    return right


def converse(talker: Talker, prompts: tuple[str, ...], temperature: float) -> None:
    """Print a conversation."""
    chat: list[dict[str, str]] = []
    for prompt in prompts:
        chat.append({"role": "user", "content": prompt})
        (reply,) = talker.replies([chat], temperature)
        chat.append({"role": "assistant", "content": reply})
        print(f"> {prompt}\n{reply}")


def report(folder: Path) -> None:
    """Print the score on held-out prompts and some conversations."""
    torch.manual_seed(1)
    talker = Talker(folder)
    wanted = probes(PER_KIND, seed=7)
    totals = Counter(probe.kind for probe in wanted)
    right = score(talker, wanted)
    for kind, total in totals.items():
        print(f"{kind:10} {right[kind]:3} of {total} right")
    print(f"{'all':10} {right.total():3} of {totals.total()} right")
    for kind, count in agent_score(talker, PER_KIND).items():
        print(f"{kind:10} {count:3} of {PER_KIND} right")
    print(f"{'promises':10} {promises_score(talker):3} of {len(PROMISES)} right")
    for temperature in (0.0, 0.7):
        for prompts in CONVERSATIONS:
            print(f"--- temperature {temperature}")
            converse(talker, prompts, temperature)


def main() -> None:
    """Show and score a trained model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    report(parser.parse_args().folder)


if __name__ == "__main__":
    main()
