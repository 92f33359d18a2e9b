"""Runs a decode step of the demo model on the available device; prints its tokens as JSON."""

import json
import sys
from collections.abc import Sequence

from headrace_engine import LLM, SamplingParams

PROMPTS = ["What is Headrace?", "Once upon a time", "Hello"]


def main(_: Sequence[str] = ()) -> None:
    # Not measured: the choice of kernels does not matter here.
    llm = LLM("headrace-demo", enable_autotuner=False)
    kinds = [SamplingParams(max_tokens=6, temperature=heat, ignore_eos=True) for heat in (0.0, 0.8)]
    found = [llm.generate(PROMPTS, kind, use_tqdm=False) for kind in kinds]
    tokens = [len(output.outputs[0].token_ids) for outputs in found for output in outputs]
    sys.stdout.write(json.dumps({"tokens": tokens}) + "\n")


if __name__ == "__main__":
    main()
