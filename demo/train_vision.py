"""Train the vision demo model on a CPU:
`python demo/train_vision.py --out common/headrace_common/demo_vision`.

The learning rate falls to zero at the end of `--minutes`.
"""

import argparse
import random
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader
from transformers import SmolVLMForConditionalGeneration

from drawings import NAMES, draw_number, draw_shapes
from optimizer import Optimizer
from picture_questions import ask, describe
from vision import (
    HIDDEN,
    Batch,
    Batches,
    Conversation,
    Said,
    batch_of,
    encode,
    logits,
    loss_of,
    new_model,
    save,
    train_tokenizer,
)

SEED = 22
MINUTES = 30.0
ROWS = 64
LEARNING_RATE = 4e-3
WEIGHT_DECAY = 0.05
WARM_UP_STEPS = 30
REPORT_STEPS = 50
UNSEEN = 48  # pictures of each kind


def unseen(tokenizer: Tokenizer) -> Mapping[str, Batch]:
    """Conversations of each kind that the model is not trained on."""
    rng = random.Random("unseen")
    found = {}
    for name, make, question in (
        ("shapes", draw_shapes, describe),
        ("numbers", draw_number, describe),
        ("questions", draw_shapes, ask),
    ):
        pictures = [make(rng) for _ in range(UNSEEN)]
        said = [Said(question(rng, picture), picture) for picture in pictures]
        found[name] = batch_of([encode(tokenizer, Conversation((each,))) for each in said])
    return found


@torch.no_grad()
def right(model: SmolVLMForConditionalGeneration, batch: Batch) -> float:
    """The share of conversations without any wrong token."""
    wrong = batch.places[logits(model, batch)[0].argmax(-1) != batch.labels] // batch.ids.shape[1]
    return 1 - len(set(wrong.tolist())) / len(batch.ids)


def optimizer(model: SmolVLMForConditionalGeneration, namer: torch.nn.Linear) -> Optimizer:
    """Muon for the matrices of layers, connector and patches."""
    matrices: list[torch.nn.Parameter] = []
    others = list(namer.parameters())
    for name, weight in model.named_parameters():
        inner = ".layers." in name or ".connector." in name or ".patch_embedding." in name
        (matrices if inner and weight.ndim > 1 else others).append(weight)
    return Optimizer(matrices, others, WEIGHT_DECAY, lambda weight: [weight.flatten(1)])


def train(model: SmolVLMForConditionalGeneration, tokenizer: Tokenizer, minutes: float) -> int:
    """Train for `minutes`; returns the number of pictures.

    The learning rate rises, then falls linearly to zero.
    """
    held = unseen(tokenizer)
    batches = DataLoader(
        Batches(tokenizer, ROWS, SEED), batch_size=None, num_workers=1, prefetch_factor=8
    )
    namer = torch.nn.Linear(HIDDEN, len(NAMES) + 1).bfloat16()
    change = optimizer(model, namer)
    begun = time.monotonic()
    pictures = 0
    for step, batch in enumerate(batches):
        left = 1 - (time.monotonic() - begun) / (60 * minutes)
        if left <= 0:
            break
        loss = loss_of(model, batch, namer)
        torch.autograd.backward(loss)
        change.step(LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * left)
        pictures += len(batch.pixels)
        if (step + 1) % REPORT_STEPS == 0:
            shares = ", ".join(f"{name} {right(model, each):.0%}" for name, each in held.items())
            print(
                f"{(time.monotonic() - begun) / 60:.1f} min  step {step + 1}  {pictures} pictures  "
                f"loss {loss.item():.3f}  right: {shares}",
                flush=True,
            )
    return pictures


def main() -> None:
    """Train and save the model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(SEED)
    tokenizer = train_tokenizer(SEED)
    model = new_model(tokenizer).bfloat16()
    print(f"{model.num_parameters():,} parameters", flush=True)
    begun = time.monotonic()
    with sdpa_kernel(SDPBackend.MATH):  # on CPUs the other one is slow for short rows
        pictures = train(model, tokenizer, arguments.minutes)
    print(f"trained for {(time.monotonic() - begun) / 60:.1f} minutes on {pictures:,} pictures")
    save(model, tokenizer, arguments.out)


if __name__ == "__main__":
    main()
