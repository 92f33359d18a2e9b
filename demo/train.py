"""Train the bundled demo model: text, tokenizer, a small Llama-shaped model, an evaluation.

`python demo/train.py --out common/headrace_common/demo_model` is the whole recipe of the shipped
files. Runs on a CPU; with the same versions, machine type and `--threads` the result is the same.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from dialogues import Dialogue, generate
from review import report

SEED = 20
DIALOGUES = 40_000
HELD_OUT_DIALOGUES = 600
VOCABULARY = 2048
CONTEXT = 2048
TOKENS_PER_BATCH = 3072
LEARNING_RATE = 4e-3
WARM_UP_STEPS = 50
WEIGHT_DECAY = 0.05

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Words with their space, single digits, punctuation, line ends: as in Qwen2's tokenizer.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_IGNORED = -100  # label of a position without loss


@dataclass(frozen=True)
class Example:
    """Token ids of one text; `labels[i]` is the token to predict at `i`, or _IGNORED."""

    ids: list[int]
    labels: list[int]


def train_tokenizer(dialogues: Sequence[Dialogue]) -> Tokenizer:
    """A byte-level BPE tokenizer: every UTF-8 text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True) for token in (END_OF_TEXT, START, END)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(dialogues), trainer)
    return tokenizer


def _texts(dialogues: Sequence[Dialogue]) -> Iterator[str]:
    yield "user assistant system"
    for dialogue in dialogues:
        yield from (dialogue.system, dialogue.text)
        for turn in dialogue.turns:
            yield from turn


def encode(tokenizer: Tokenizer, dialogue: Dialogue) -> Example:
    """The dialogue in the chat template's form, with loss on what the model says only."""
    parts: list[tuple[str, bool]] = []
    if dialogue.text:
        parts.append((dialogue.text + END_OF_TEXT, True))
    if dialogue.system:
        parts.append((f"{START}system\n{dialogue.system}{END}\n", False))
    for turn in dialogue.turns:
        parts.append((f"{START}user\n{turn.prompt}{END}\n{START}assistant\n", False))
        parts.append((turn.reply + END, True))
        parts.append(("\n", False))
    ids: list[int] = []
    wanted: list[int] = []
    for text, learned in parts:
        piece: list[int] = tokenizer.encode(text).ids
        ids += piece
        wanted += piece if learned else [_IGNORED] * len(piece)
    return Example(ids[: CONTEXT - 1], [*wanted[1:], _IGNORED][: CONTEXT - 1])


def batches(examples: Sequence[Example], rng: random.Random) -> list[list[Example]]:
    """Batches of texts of similar length: no text sees another, and little is padding."""
    order = sorted(range(len(examples)), key=lambda at: (len(examples[at].ids), rng.random()))
    made: list[list[Example]] = [[]]
    for at in order:
        longest = len(examples[at].ids)
        if longest * (len(made[-1]) + 1) > TOKENS_PER_BATCH:
            made.append([])
        made[-1].append(examples[at])
    rng.shuffle(made)
    return made


def padded(rows: Sequence[list[int]], filler: int) -> torch.Tensor:
    """int64 [len(rows), longest row], filled up on the right."""
    longest = max(map(len, rows))
    return torch.tensor([row + [filler] * (longest - len(row)) for row in rows])


def _id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None, "a special token of this file"
    return found


def new_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """The untrained model, float32."""
    end = [_id(tokenizer, END), _id(tokenizer, END_OF_TEXT)]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end[1],
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("eager")  # on short texts faster than torch's CPU kernels
    model.generation_config = GenerationConfig.from_dict(
        {"eos_token_id": end, "pad_token_id": end[1]}
    )
    return model


def loss_of(model: LlamaForCausalLM, batch: Sequence[Example]) -> torch.Tensor:
    """Mean cross entropy over the positions with a label."""
    labels = padded([example.labels for example in batch], _IGNORED)
    with torch.autocast("cpu", torch.bfloat16):
        ids = padded([example.ids for example in batch], 0)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[labels != _IGNORED])
    return torch.nn.functional.cross_entropy(logits.float(), labels[labels != _IGNORED])


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the weight matrices of the layers, AdamW for embeddings and norms."""
    layers = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    chosen = {id(weight) for weight in layers}
    others = [weight for weight in model.parameters() if id(weight) not in chosen]
    return [
        torch.optim.Muon(
            layers, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(model: LlamaForCausalLM, steps: Sequence[list[Example]]) -> None:
    """One pass over the batches: warm-up, then a cosine down to a fiftieth of the rate."""
    chosen = optimizers(model)
    smooth = 0.0
    bar = tqdm(steps, desc="training", unit="step", mininterval=10)
    for step, batch in enumerate(bar):
        cosine = 0.51 + 0.49 * math.cos(math.pi * step / len(steps))
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * cosine
        loss = loss_of(model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in chosen:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        smooth = loss.item() if step == 0 else 0.96 * smooth + 0.04 * loss.item()
        bar.set_postfix(loss=f"{smooth:.3f}", refresh=False)


def held_out_loss(model: LlamaForCausalLM, examples: Sequence[Example]) -> float:
    """Mean loss per batch on dialogues of another seed."""
    with torch.no_grad():
        losses = [loss_of(model, batch).item() for batch in batches(examples, random.Random(0))]
    return sum(losses) / len(losses)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write weights (bfloat16), tokenizer and configuration."""
    out.mkdir(parents=True, exist_ok=True)
    model.bfloat16()
    model.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    """Train and save the model, then show what it says to prompts it has not seen."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dialogues", type=int, default=DIALOGUES)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    texts = list(generate(arguments.dialogues, SEED))
    tokenizer = train_tokenizer(texts[:20_000])
    steps = batches([encode(tokenizer, text) for text in texts], rng)
    model = new_model(tokenizer)
    tokens = sum(len(example.ids) for batch in steps for example in batch)
    print(f"{model.num_parameters():,} parameters, {tokens:,} tokens, {len(steps):,} steps")
    began = time.monotonic()
    train(model, steps)
    print(f"trained for {(time.monotonic() - began) / 60:.1f} minutes")
    unseen = [encode(tokenizer, text) for text in generate(HELD_OUT_DIALOGUES, SEED + 1)]
    print(f"held-out loss {held_out_loss(model, unseen):.4f}")
    save(model, tokenizer, arguments.out)
    report(arguments.out)


if __name__ == "__main__":
    main()
