"""Compares the perplexity of GGUF files in Headrace and in llama.cpp, on the same text.

    python benchmarks/gguf_perplexity.py --perplexity LLAMA_PERPLEXITY --text FILE MODEL.gguf ...

LLAMA_PERPLEXITY is llama.cpp's program of that name. As it does, Headrace cuts the text into chunks
of CONTEXT tokens and scores the second half of each.
"""

import argparse
import re
import subprocess
from pathlib import Path

import torch
from torch.nn import functional as F

from accuracy import Prober
from headrace_common.text.tokenizer import Tokenizer

CONTEXT = 512
DTYPES = ("float32", "bfloat16")
_RESULT = re.compile(r"Final estimate: PPL = ([0-9.]+)")


def of_llama(program: Path, model: Path, text: Path) -> float:
    command = [str(program), "-m", str(model), "-f", str(text), "-c", str(CONTEXT), "-t", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = _RESULT.search(done.stdout + done.stderr)
    if found is None:
        raise SystemExit(f"llama-perplexity printed no result: {done.stderr[-2000:]}")
    return float(found[1])


def of_headrace(model: Path, text: Path, dtype: str) -> float:
    tokenizer = Tokenizer.load(str(model))
    ids = tokenizer.encode(text.read_text())
    first = tokenizer.encode("")  # the tokens that begin a text, if the model wants any
    prober = Prober(str(model), {"dtype": dtype})
    half, losses = CONTEXT // 2, []
    for begin in range(0, len(ids) - CONTEXT + 1, CONTEXT):
        chunk = ids[begin : begin + CONTEXT]
        logits = prober.logits([*first, *chunk[len(first) :]])[half:-1]
        losses.append(F.cross_entropy(logits, torch.tensor(chunk[half + 1 :]), reduction="none"))
    return float(torch.cat(losses).mean().exp())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--perplexity", type=Path, required=True, help="llama.cpp's program")
    parser.add_argument("--text", type=Path, required=True, help="at least 1,024 tokens")
    parser.add_argument("models", type=Path, nargs="+", help="GGUF files")
    options = parser.parse_args()
    print(f"| file | llama.cpp |{''.join(f' {dtype} | difference |' for dtype in DTYPES)}")
    print(f"| --- | ---: |{' ---: | ---: |' * len(DTYPES)}")
    for model in options.models:
        theirs = of_llama(options.perplexity, model, options.text)
        cells = f"| {model.stem} | {theirs:.4f} |"
        for dtype in DTYPES:
            ours = of_headrace(model, options.text, dtype)
            cells += f" {ours:.4f} | {ours / theirs - 1:+.3%} |"
        print(cells, flush=True)


if __name__ == "__main__":
    main()
