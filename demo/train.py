"""Train the bundled demo model: `python demo/train.py --out common/headrace_common/demo_model`.

Runs for `--seconds` on a GPU, while other processes make the training text. The learning rate falls
to zero at the end. `--device cpu` takes longer and shows that the script works. The tokenizer is
`demo/tokenizer.json`.
"""

import time

_STARTED = time.monotonic()

import argparse  # noqa: E402
import os  # noqa: E402
import random  # noqa: E402
from collections.abc import Mapping  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from batches import Batch, Batches, batch_of, width_of  # noqa: E402
from dialogues import AGENT_KINDS, generate  # noqa: E402
from llama import Llama, optimizer, save  # noqa: E402
from tokens import FILE, encode  # noqa: E402

SEED = 20
SECONDS = 130.0
TOKENS_PER_BATCH = 32_768
LEARNING_RATE = 5e-3
WEIGHT_DECAY = 0.05
WARM_UP_STEPS = 100
RESERVED_S = 4.0  # share of the time for the last evaluation and the files
REPORT_S, SAVE_S = 5.0, 30.0
UNSEEN_PER_KIND = 128
CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"


class Unseen:
    """Texts of every kind that the model is not trained on."""

    def __init__(self, device: torch.device) -> None:
        tokenizer = Tokenizer.from_file(str(FILE))
        sources = {"mixed": list(generate(UNSEEN_PER_KIND, "unseen"))}
        for kind, make in AGENT_KINDS.items():
            rng = random.Random(f"unseen {kind}")
            sources[kind] = [make(rng) for _ in range(UNSEEN_PER_KIND)]
        self._batches: dict[str, list[Batch]] = {}
        for kind, dialogues in sources.items():
            by_width: dict[int, list[Batch]] = {}
            examples = [encode(tokenizer, dialogue) for dialogue in dialogues]
            for width in {width_of(example) for example in examples}:
                same = [example for example in examples if width_of(example) == width]
                by_width[width] = [batch_of(same, width).to(device)]
            self._batches[kind] = [batch for found in by_width.values() for batch in found]

    @torch.no_grad()
    def scores(self, model: Llama) -> Mapping[str, tuple[float, float]]:
        """The mean loss of each kind, and the share of texts without any wrong token."""
        found = {}
        for kind, batches in self._batches.items():
            loss, tokens, right, texts = 0.0, 0, 0, 0
            for batch in batches:
                logits = model.logits(batch)
                loss += torch.nn.functional.cross_entropy(
                    logits, batch.labels, reduction="sum"
                ).item()
                wrong = batch.places[logits.argmax(-1) != batch.labels] // batch.ids.shape[1]
                texts += len(batch.ids)
                right += len(batch.ids) - len(set(wrong.tolist()))
                tokens += len(batch.labels)
            found[kind] = (loss / tokens, right / texts)
        return found


def train(
    model: Llama, batches: Batches, unseen: Unseen, device: torch.device, ends: float, out: Path
) -> None:
    """Train until the time `ends`. The learning rate rises, then falls linearly to zero."""
    steps = optimizer(model, WEIGHT_DECAY)
    begun = reported = saved = time.monotonic()
    step = tokens = 0
    while (now := time.monotonic()) < ends:
        left = (ends - now) / (ends - begun)
        batch = batches.next().to(device)
        loss = model.loss(batch)
        torch.autograd.backward(loss)
        steps.step(LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS) * left)
        tokens += batch.ids.numel()
        step += 1
        if step % 20 == 0 or device.type == "cpu":
            shown = loss.item()  # waits for the device, so that the clock is right
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                print(
                    f"{reported - _STARTED:6.1f} s  step {step}  {tokens / 1e6:.1f} M tokens  "
                    f"{batches.repeated} repeated  loss {shown:.4f}",
                    flush=True,
                )
            if time.monotonic() - saved > SAVE_S:
                saved = time.monotonic()
                report(model, unseen)
                save(model, out, FILE, CHAT_TEMPLATE.read_text(encoding="utf-8"))


def report(model: Llama, unseen: Unseen) -> None:
    """Print the scores of the unseen texts."""
    for kind, (loss, right) in unseen.scores(model).items():
        print(f"    {kind:10} loss {loss:.4f}  {right:6.1%} right", flush=True)


def main() -> None:
    """Train, evaluate and save the model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--tokens", type=int, default=TOKENS_PER_BATCH)
    arguments = parser.parse_args()
    ends = _STARTED + arguments.seconds - RESERVED_S
    batches = Batches(
        arguments.processes, arguments.tokens, SEED
    )  # processes start before the GPU is used
    device = torch.device(arguments.device)
    torch.manual_seed(SEED)
    model = Llama().to(device, torch.bfloat16)
    unseen = Unseen(device)
    count = sum(weight.numel() for weight in model.parameters())
    print(f"{time.monotonic() - _STARTED:6.1f} s  {count:,} parameters", flush=True)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        train(model, batches, unseen, device, ends, arguments.out)
    save(model, arguments.out, FILE, CHAT_TEMPLATE.read_text(encoding="utf-8"))
    report(model, unseen)
    batches.close()
    print(f"{time.monotonic() - _STARTED:6.1f} s  saved in {arguments.out}", flush=True)


if __name__ == "__main__":
    main()
