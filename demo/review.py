"""Show and score what a trained demo model says: `python demo/review.py MODEL_FOLDER`."""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from dialogues import Probe, probes

PER_KIND = 30
MAX_NEW_TOKENS = 220
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
    """Generates replies of a model in float32 through its chat template."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, padding_side="left"
        )
        self._model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def replies(self, chats: list[list[dict[str, str]]], temperature: float = 0.0) -> list[str]:
        """One reply per chat; a reply that does not end by itself gets three dots."""
        inputs = self._tokenizer(
            [self._prompt(chat) for chat in chats], return_tensors="pt", padding=True
        )
        with torch.no_grad():
            ids = self._model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=temperature > 0,
                temperature=temperature or 1.0,
            )
        return [self._text(row) for row in ids[:, inputs["input_ids"].shape[1] :].tolist()]

    def _prompt(self, chat: list[dict[str, str]]) -> str:
        template = self._tokenizer.apply_chat_template
        return str(template(chat, tokenize=False, add_generation_prompt=True))

    def _text(self, ids: list[int]) -> str:
        text = str(self._tokenizer.decode(ids, skip_special_tokens=True))
        return text if self._tokenizer.eos_token_id in ids else text + " ..."


def score(talker: Talker, wanted: list[Probe]) -> Counter[str]:
    """Counts the probes of each kind that greedy decoding answers right; prints the wrong
    answers."""
    right: Counter[str] = Counter()
    for first in range(0, len(wanted), 30):
        group = wanted[first : first + 30]
        chats = [[{"role": "user", "content": probe.prompt}] for probe in group]
        for probe, reply in zip(group, talker.replies(chats), strict=True):
            right[probe.kind] += reply in probe.accepted
            if reply not in probe.accepted:
                print(f"  {probe.kind}: {probe.prompt!r} -> {reply!r}")
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
