"""Compares greedy output in float32 with that of transformers, for a whole workload.

    python benchmarks/equality.py [--model DIR] [--requests 64]

All requests run in one batch, with chunked prefill and preemption; transformers runs them one by
one. A difference is counted separately if the two best logits are closer than float32 rounding. Any
other difference gives exit status 1.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from headrace_engine import LLM, SamplingParams
from offline_features import Work, mixed
from offline_models import make_model

TIE = 1e-4


def ours(model: str, work: list[Work]) -> list[list[int]]:
    llm = LLM(model, dtype="float32", skip_tokenizer_init=True)
    outputs = llm.generate(
        [{"prompt_token_ids": item.prompt} for item in work],
        [
            SamplingParams(temperature=0, max_tokens=item.output_tokens, ignore_eos=True)
            for item in work
        ],
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def reference(model: str) -> Any:
    from transformers import AutoModelForCausalLM

    net: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return net.eval()


def first_difference(net: Any, item: Work, tokens: list[int]) -> tuple[int, float] | None:
    """The first position whose token is not the reference's best, and by how much it is worse.

    One forward pass over prompt and output: the reference's logits after each prefix.
    """
    ids = torch.tensor([item.prompt + tokens])
    logits = net(ids).logits[0, len(item.prompt) - 1 : -1]
    best = logits.max(-1).values
    lost = best - logits.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
    wrong = lost.nonzero().flatten()
    return None if len(wrong) == 0 else (int(wrong[0]), float(lost[wrong[0]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="folder of a checkpoint")
    parser.add_argument("--requests", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        if options.model is None:
            make_model(Path(scratch))
        model = options.model or scratch
        vocab_size = int(json.loads((Path(model) / "config.json").read_text())["vocab_size"])
        work = mixed(options.requests, vocab_size, 0)
        outputs = ours(model, work)
        net = reference(model)
        equal = ties = 0
        for number, (item, tokens) in enumerate(zip(tqdm(work), outputs, strict=True)):
            found = first_difference(net, item, tokens)
            equal += found is None
            if found is not None and found[1] <= TIE:
                ties += 1
            elif found is not None:
                print(f"request {number}: token {found[0]} is {found[1]:.6f} below the best")
    total = sum(item.output_tokens for item in work)
    print(f"{equal} of {len(work)} requests equal, {ties} at ties; {total} tokens")
    sys.exit(equal + ties < len(work))


if __name__ == "__main__":
    main()
