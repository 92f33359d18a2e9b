"""Runs one engine in its own process, for peers.py: loads a model, then runs jobs from stdin.

Runs in each peer's own environment, so it imports only the standard library and the one engine that
it is asked for. A job is a line of JSON with `prompts` (token ids) and `outputs` (how many tokens
each); the answer is a line with the seconds it took. Greedy, the end-of-sequence token ignored.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Prompts = Sequence[Sequence[int]]
Run = Callable[[Prompts, Sequence[int]], list[int]]


def headrace(options: argparse.Namespace) -> Run:
    from headrace_engine import LLM, SamplingParams

    llm = LLM(
        options.model,
        dtype=options.dtype,
        quantization="int8" if options.weights == "int8" else "none",
        threads=options.threads,
        max_model_len=options.max_model_len,
        kv_cache_bytes=options.kv_cache_bytes,
        enable_prefix_caching=options.everything,
        skip_tokenizer_init=True,
    )

    def run(prompts: Prompts, outputs: Sequence[int]) -> list[int]:
        params = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in outputs
        ]
        done = llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False
        )
        return [len(output.outputs[0].token_ids) for output in done]

    return run


def vllm(options: argparse.Namespace) -> Run:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, options.kv_cache_bytes // 2**30)))
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]  # the peer's own venv

    llm = LLM(
        model=options.model,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        enforce_eager=options.eager,
        seed=0,
    )

    def run(prompts: Prompts, outputs: Sequence[int]) -> list[int]:
        params = [
            SamplingParams(
                temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False
            )
            for count in outputs
        ]
        done = llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False
        )
        return [len(output.outputs[0].token_ids) for output in done]

    return run


def llama_cpp(options: argparse.Namespace) -> Run:
    """Runs one request after the other with llama-cpp-python."""
    from llama_cpp import Llama  # type: ignore[import-not-found]  # the peer's own venv

    llama: Any = Llama(
        model_path=options.model,
        n_ctx=options.max_model_len,
        n_batch=512,
        n_threads=options.threads,
        n_threads_batch=options.threads,
        verbose=False,
    )

    def one(prompt: Sequence[int], count: int) -> int:
        llama.reset()
        generated = 0
        for _ in llama.generate(list(prompt), temp=0.0, repeat_penalty=1.0):
            generated += 1
            if generated == count:
                break
        return generated

    def run(prompts: Prompts, outputs: Sequence[int]) -> list[int]:
        return [one(prompt, count) for prompt, count in zip(prompts, outputs, strict=True)]

    return run


ENGINES: dict[str, Callable[[argparse.Namespace], Run]] = {
    "headrace": headrace,
    "vllm": vllm,
    "llama.cpp": llama_cpp,
}


def serve(options: argparse.Namespace) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    run = ENGINES[options.engine](options)
    run([[7] * 16] * 2, [4] * 2)
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        job = json.loads(line)
        begin = time.perf_counter()
        counts = run(job["prompts"], job["outputs"])
        seconds = time.perf_counter() - begin
        if counts != job["outputs"]:
            raise RuntimeError(f"{options.engine} did not generate what was asked for")
        answers.write(json.dumps({"seconds": seconds}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--model", required=True)
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--dtype", default="auto", help="llama.cpp takes the file's")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--kv-cache-bytes", type=int, default=2**31)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--everything", action="store_true")
    serve(parser.parse_args())


if __name__ == "__main__":
    main()
