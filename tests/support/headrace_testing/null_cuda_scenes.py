"""Scenes of test_null_cuda on the null CUDA device: every branch of the engine that needs a GPU.
Prints a line of JSON for each scene; must be started by `null_cuda`.
"""

import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers

from headrace_common.sampling.params import SamplingParams
from headrace_common.structured.structured import StructuredOutputsParams
from headrace_engine.autotune import start
from headrace_engine.autotune.autotuner import CudaTimer
from headrace_engine.engine.engine import Engine
from headrace_engine.kernels.triton.dependent_launch import DependentLaunch, StepLaunch
from headrace_engine.lora.request import LoRARequest
from headrace_engine.models.placed_model import PlacedModel
from headrace_engine.offline.beams import BeamSearchParams
from headrace_engine.offline.llm import LLM
from headrace_engine.operators.triton import TritonOps
from headrace_testing.adapters import save_adapter
from headrace_testing.checkpoints import make_tokenizer
from headrace_testing.engines import request
from headrace_testing.null_device import NullDevice, Watched

Facts = dict[str, Any]
STEPS = 10
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# Large enough for products that our own kernels compute.
WIDE: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 3072}
SAMPLED: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.8, "seed": 3, "min_p": 0.1},
    {"logprobs": 3, "prompt_logprobs": 2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    {"temperature": 1.0, "n": 2, "logit_bias": {3: 2.0}},
)


class Scenes:
    """Each scene is a method; `folder` is for checkpoints."""

    def __init__(self, folder: Path, device: NullDevice) -> None:
        self._folder, self._device = folder, device

    def checkpoint(self, name: str, **changes: Any) -> str:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
        return str(folder)

    def stored(self) -> Path:
        """A checkpoint with weights and a tokenizer."""
        folder = Path(self.checkpoint("stored"))
        if not (folder / "tokenizer.json").exists():
            config = transformers.AutoConfig.from_pretrained(folder)
            make: Any = transformers.AutoModelForCausalLM
            make.from_config(config).save_pretrained(folder)
            make_tokenizer().save(str(folder / "tokenizer.json"))
        return folder

    def llm(self, **options: Any) -> LLM:
        defaults: dict[str, Any] = {
            "model": self.checkpoint("llama"),
            "device": "cuda",
            "load_format": "dummy",
            "max_num_seqs": 2,
            "max_model_len": 256,
            "max_num_batched_tokens": 256,
            "skip_tokenizer_init": True,
            "enable_autotuner": False,
            "dtype": "bfloat16",
        }
        return LLM(**{**defaults, **options})

    def capture_rules(self) -> Facts:
        """Calls that may not be recorded, and CUDA's errors for them."""
        rows = torch.ones(8, 8, device="cuda")
        pinned = torch.ones(8, pin_memory=True)
        make_stream: Any = torch.cuda.Stream
        other = make_stream()
        forbidden: dict[str, Callable[[], object]] = {
            "item": lambda: rows.sum().item(),
            "synchronize": torch.cuda.synchronize,
            "to pageable": lambda: torch.empty(8, 8).copy_(rows, non_blocking=True),
            "unjoined": lambda: _fork(other, rows),
            "outside": lambda: torch.cuda.current_stream().wait_stream(other),
        }
        allowed: dict[str, Callable[[], object]] = {
            "kernels": lambda: rows @ rows + 1,
            "from pinned": lambda: rows[0].copy_(pinned, non_blocking=True),
            "new memory": lambda: torch.empty(64 << 20, device="cuda"),
            "joined": lambda: _fork(other, rows, join=True),
        }
        other.wait_stream(torch.cuda.current_stream())
        rows @ rows  # makes cuBLAS's handle, which a recording cannot
        refused = {name: _recording_error(run) for name, run in forbidden.items()}
        accepted = {name: _recording_error(run) for name, run in allowed.items()}
        return {"refused": refused, "accepted": accepted}

    def races(self) -> Facts:
        """Writes pinned memory before it was read, and reads it before it is written."""
        pinned = torch.arange(64).pin_memory()
        moved = pinned.to("cuda", non_blocking=True)
        pinned.zero_()
        early = torch.empty(64, dtype=torch.int64, pin_memory=True).copy_(moved, non_blocking=True)
        before = early.tolist()
        torch.cuda.synchronize()
        reported = [line for line in self._device.complaints() if "pinned memory changed" in line]
        return {"before": before[0], "after": early.tolist()[0], "told": len(reported)}

    def full(self) -> Facts:
        free, total = torch.cuda.mem_get_info()
        try:
            torch.empty(total, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            return {"full": True, "free": free, "total": total}
        return {"full": False}

    def decoding(self) -> Facts:
        """Decodes four sequences, greedy and sampled, always with CUDA graphs; then requests with
        other parameters, and beams."""
        llm = self.llm(max_num_seqs=4)
        watched = self._steady(llm.llm_engine.model.engine)
        drawn = self._steady(llm.llm_engine.model.engine, temperature=0.8, top_p=0.9, top_k=50)
        ended = [self._generated(llm, **kind)["ended"] for kind in SAMPLED]
        found = llm.beam_search(_prompts(2), BeamSearchParams(beam_width=3, max_tokens=6))
        beams = [len(one.sequences) for one in found]
        steady, random = ({"counts": one.counts, "waits": one.waits} for one in (watched, drawn))
        return {"steady": steady, "random": random, "ended": ended, "beams": beams}

    def _steady(self, engine: Engine, temperature: float = 0.0, **options: Any) -> Watched:
        endless = SamplingParams(
            temperature=temperature, max_tokens=100, ignore_eos=True, **options
        )
        for number in range(4):
            engine.add_request(request(str(number), range(3, 30 + number), endless))
        for _ in range(8):
            engine.step()
        with self._device.watch() as watched:
            for _ in range(STEPS):
                engine.step()
        for number in range(4):
            engine.abort(str(number))
        while engine.has_work:
            engine.step()
        return watched

    def eager(self) -> Facts:
        """An engine without recorded graphs that waits for each step."""
        return self._generated(self.llm(enforce_eager=True, async_scheduling=False))

    def replaced(self) -> Facts:
        """Two models one after the other, while the garbage collector rests."""
        gc.disable()
        try:
            blocks = [self._used_blocks() for _ in range(2)]
        finally:
            gc.enable()
        return {"blocks": blocks}

    def _used_blocks(self) -> int:
        llm = self.llm()
        self._generated(llm)
        return llm.llm_engine.model.runner.num_blocks

    def deterministic(self) -> Facts:
        return self._generated(self.llm(deterministic=True))

    def timer(self) -> Facts:
        """Measures kernels, even after one that cannot be recorded."""
        rows, timer = torch.ones(8, 8, device="cuda"), CudaTimer()
        refused = ""
        try:
            timer(lambda: rows + rows.sum().item())
        except RuntimeError as error:
            refused = str(error).splitlines()[0]
        times = [timer(lambda: rows + 1), timer(lambda: rows @ rows + 1)]
        return {"times": times, "refused": refused, "kept": _kept_by_streams()}

    def tuned(self) -> Facts:
        """Measures all kernels, then uses the table of the results.

        No test runs this scene, since it compiles for minutes.
        """
        tables = self._folder / "tables"
        options = {"tuned_config_folder": str(tables), "enable_autotuner": True}
        with self._device.watch() as first:
            found = self._generated(self.llm(**options))
        with self._device.watch() as second:
            self._generated(self.llm(**options))
        timed, again = (one.counts.get("cudaEventElapsedTime", 0) for one in (first, second))
        return {**found, "timed": timed, "timed_again": again}

    def fused_norms(self) -> Facts:
        """Records steps with fused norms and overlapping kernels, as if these were fastest."""
        model = self.checkpoint("wide", **WIDE)

        def choose(placed: PlacedModel, _: object) -> None:
            assert isinstance(placed.ops, TritonOps)
            placed.ops.dependent_launches.choose(
                4, StepLaunch(DependentLaunch(8 << 20), fused_norms=True)
            )

        with patch.object(start, "tune", choose), self._device.watch() as watched:
            llm = self.llm(model=model, max_num_seqs=4, enable_autotuner=True)
        return {**self._generated(llm), "counts": watched.counts}

    def eight_bits(self) -> Facts:
        """All weights, those of experts too, and the cache are 8-bit floats."""
        model = self.checkpoint("experts", **EXPERTS)
        return self._generated(self.llm(model=model, quantization="fp8", kv_cache_dtype="fp8"))

    def four_bits(self) -> Facts:
        gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
        model = self.checkpoint("gptq", quantization_config=gptq)
        return self._generated(self.llm(model=model))

    def adapters(self) -> Facts:
        model = self.stored()
        adapter = save_adapter(self._folder / "adapter", model)
        llm = self.llm(model=str(model), load_format="auto", enable_lora=True, max_loras=2)
        one = LoRARequest("one", 1, str(adapter))
        return self._generated(llm, lora=[one, None, one, None, None, one])

    def swapped(self) -> Facts:
        llm = self.llm(num_blocks=24, swap_space=0.01, max_num_seqs=8)
        with self._device.watch() as watched:
            found = self._generated(llm, output=60)
        waits = [line for line in watched.waits if "DeviceSynchronize" in line]
        return {
            **found,
            "swapped": llm.llm_engine.model.engine.stats().swap_out_bytes,
            "waits": waits,
        }

    def speculation(self) -> Facts:
        ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
        return self._generated(self.llm(speculative_config=ngram))

    def draft_model(self) -> Facts:
        drafts = {
            "model": self.checkpoint("draft", num_hidden_layers=1),
            "num_speculative_tokens": 3,
        }
        return self._generated(self.llm(speculative_config=drafts))

    def grammar(self) -> Facts:
        """The device answers every copy with the one token that the expression allows."""
        llm = self.llm(model=str(self.stored()), skip_tokenizer_init=False)
        token = llm.get_tokenizer().encode("a")[-1]
        self._device.answer(token)
        try:
            expression = StructuredOutputsParams(regex="a+")
            params = SamplingParams(max_tokens=8, temperature=0.0, structured_outputs=expression)
            found = llm.generate(["hello"] * 4, params, use_tqdm=False)
        finally:
            self._device.answer(0)
        return {"texts": [one.outputs[0].text for one in found]}

    def embeddings(self) -> Facts:
        llm = self.llm(model=str(self.stored()), load_format="auto", task="embed")
        found = llm.embed(_prompts(5), use_tqdm=False)
        return {"sizes": [len(one.outputs.embedding) for one in found]}

    def _generated(self, llm: LLM, output: int = 12, lora: Any = None, **options: Any) -> Facts:
        sampling = {"temperature": 0.0, "ignore_eos": True, **options}
        params = SamplingParams(max_tokens=output, **sampling)
        found = llm.generate(_prompts(6), params, use_tqdm=False, lora_request=lora)
        ended = [(len(one.token_ids), one.finish_reason) for each in found for one in each.outputs]
        return {"ended": sorted(set(ended))}


def _prompts(count: int) -> Any:
    return [{"prompt_token_ids": list(range(3, 43 + number))} for number in range(count)]


def _fork(stream: Any, rows: torch.Tensor, join: bool = False) -> None:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        rows + 1
    if join:
        torch.cuda.current_stream().wait_stream(stream)


def _kept_by_streams() -> int:
    """Bytes that stay reserved after tensors were made on one stream and used on another."""
    make_stream: Any = torch.cuda.Stream
    side, before = make_stream(), torch.cuda.memory_reserved()
    for _ in range(50):
        with torch.cuda.stream(side):
            made = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        made.record_stream(torch.cuda.current_stream())
        del made
        torch.cuda.synchronize()
    return torch.cuda.memory_reserved() - before


def _recording_error(run: Callable[[], object]) -> str:
    make_graph: Any = torch.cuda.CUDAGraph
    graph = make_graph()
    try:
        with torch.cuda.graph(graph):
            run()
        graph.replay()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.synchronize()
    return ""


def _clean_up() -> None:
    """Frees what a scene has left, and exempts the modules from the collections of the next one,
    which would take a quarter of its time."""
    clear_workspaces: Any = torch._C
    clear_workspaces._cuda_clearCublasWorkspaces()
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    torch.cuda.empty_cache()


def run(names: Sequence[str]) -> None:
    """Runs the scenes.

    Prints the facts or the error of each scene, and the objects that it has not freed.
    """
    device = NullDevice()
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder:
        scenes = Scenes(Path(folder), device)
        for name in names:
            begun = time.perf_counter()
            told = len(device.complaints())
            try:
                facts = getattr(scenes, name)()
            except Exception:  # noqa: BLE001  the other scenes shall run, too
                facts = {"raised": traceback.format_exc()}
            _clean_up()
            facts["complaints"] = device.complaints()[told:]
            facts["graphs"] = device.counts()["live.graphs"]
            facts["allocated"] = torch.cuda.memory_allocated()
            facts["seconds"] = time.perf_counter() - begun
            sys.stdout.write(json.dumps({"scene": name, **facts}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    run(sys.argv[1:])
