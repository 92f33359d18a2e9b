"""A checkpoint, adapters of it, and transformers' greedy tokens of the merged weights."""

from pathlib import Path
from typing import Any

from headrace_common.sampling.params import SamplingParams
from headrace_engine import LLM, LoRARequest
from headrace_testing.adapters import save_adapter, save_merged
from headrace_testing.checkpoints import GreedyPath, Reference

LENGTH = 8
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, min_tokens=LENGTH)
# The modules of each adapter: all, some with different ranks, and few.
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"seed": 1},
    "some": {
        "seed": 2,
        "modules": ("q_proj", "v_proj", "up_proj"),
        "rank": 8,
        "use_rslora": True,
        "rank_pattern": {"v_proj": 3},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 4.0},
    },
    "one": {"seed": 3, "modules": ("down_proj",), "rank": 2, "layers_to_transform": [1]},
}


class AdapterScene:
    """A checkpoint with adapters, and transformers' outputs for prompts with each of them."""

    def __init__(self, folder: Path, checkpoint: Path, kinds: dict[str, dict[str, Any]]) -> None:
        self.checkpoint = checkpoint
        self.folders = {
            name: save_adapter(folder / name, checkpoint, **kind) for name, kind in kinds.items()
        }
        self.requests = {
            name: LoRARequest(name, index, str(path))
            for index, (name, path) in enumerate(self.folders.items(), start=1)
        }
        merged = {
            name: save_merged(folder / f"merged-{name}", checkpoint, path)
            for name, path in self.folders.items()
        }
        self._references = {None: Reference(checkpoint)} | {
            name: Reference(path) for name, path in merged.items()
        }

    def paths(self, name: str | None, count: int = 3) -> list[GreedyPath]:
        return self._references[name].clear_paths(count, LENGTH)

    def llm(self, **options: Any) -> LLM:
        usual = {"max_loras": 2, "num_blocks": 256, "max_model_len": 256, "dtype": "float32"}
        return LLM(
            str(self.checkpoint),
            **{"skip_tokenizer_init": True, "enable_lora": True, **usual, **options},
        )

    def run(self, llm: LLM, names: list[str | None], count: int = 3) -> None:
        """Runs the prompts of these adapters at once; checks that they give transformers'
        tokens."""
        work = [(name, path) for path in range(count) for name in names]
        paths = {name: self.paths(name, count) for name in names}
        outputs = llm.generate(
            [{"prompt_token_ids": list(paths[name][index].prompt)} for name, index in work],
            GREEDY,
            use_tqdm=False,
            lora_request=[None if name is None else self.requests[name] for name, _ in work],
        )
        found = [tuple(output.outputs[0].token_ids) for output in outputs]
        assert found == [paths[name][index].output for name, index in work]
