"""LoRA adapters: the same tokens as merged weights, several in a batch, slots, caches, refusals.

The reference is transformers on W + scale * B A in float32. Not covered here: gateway and queue.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_common.sampling.params import SamplingParams
from headrace_engine import LLM, LoRARequest
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.errors import CheckpointError, ConfigError, RequestError
from headrace_engine.lora.adapter import AdapterFile
from headrace_engine.lora.shapes import AdaptableModel
from headrace_engine.lora.slots import LoRASlots
from headrace_engine.offline.beams import BeamSearchParams
from headrace_engine.offline.llm import TokensPrompt
from headrace_testing.adapter_scenes import ADAPTERS, GREEDY, LENGTH, AdapterScene
from headrace_testing.adapters import ALL_MODULES, save_adapter, save_merged, write_config
from headrace_testing.engines import cpu_backends

CheckpointMaker = Callable[[str], Path]
LATENT_MODULES = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
# Adapters of mixtures of experts.
MIXTURES: dict[str, dict[str, Any]] = {
    "apart": {
        "modules": (*ALL_MODULES, "shared_expert_gate"),
        "experts": "apart",
        "seed": 1,
        "rank_pattern": {"up_proj": 6, "experts.2.gate_proj": 2},
    },
    "joined": {"modules": (), "experts": "joined", "seed": 2, "rank": 3},
    "attention": {"modules": ("q_proj",), "seed": 3},
}


@pytest.fixture(scope="session")
def scene(adapter_scene: AdapterScene) -> AdapterScene:
    return adapter_scene


@pytest.fixture(scope="session")
def llm(scene: AdapterScene) -> LLM:
    """Two slots for three adapters."""
    return scene.llm()


@pytest.fixture(scope="module")
def made(
    checkpoint: CheckpointMaker, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., AdapterScene]:
    """A checkpoint of a shape with an adapter of these modules, or with those of mixtures; made
    once for all backends."""

    @cache
    def make(shape: str, modules: tuple[str, ...] | None = None) -> AdapterScene:
        kinds = MIXTURES if modules is None else {"a": {"modules": modules}}
        return AdapterScene(tmp_path_factory.mktemp(shape), checkpoint(shape), kinds)

    return make


@pytest.mark.proves("adapters", shapes=["qwen3"])
def test_a_batch_with_and_without_adapters_gives_the_tokens_of_merged_weights(
    scene: AdapterScene, llm: LLM
) -> None:
    scene.run(llm, [None, "all", "some", "one"])


@pytest.mark.proves("adapters", by="shape")
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("shape", "modules"),
    [
        ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("gemma2", ALL_MODULES),
        ("glm4", ("q_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("qwen3-moe", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("gpt-oss", ("q_proj", "v_proj", "o_proj")),
        ("llama4", ALL_MODULES),
        ("mimo-v2", ALL_MODULES),
        ("deepseek-v3", LATENT_MODULES),
        ("deepseek-v32", LATENT_MODULES),
        ("glm-moe-dsa-shared", LATENT_MODULES),
    ],
)
def test_every_kind_of_native_decoder_takes_adapters(
    shape: str,
    modules: tuple[str, ...],
    backend: str,
    made: Callable[..., AdapterScene],
) -> None:
    scene = made(shape, modules)

    scene.run(scene.llm(attention_backend=backend), [None, "a"], count=2)


@pytest.mark.proves("adapters", by="shape")
@pytest.mark.parametrize(
    ("shape", "modules"),
    [
        ("solar-open", ALL_MODULES),
        ("dots1", ALL_MODULES),
        ("minimax-m2", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("olmoe", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("ernie4_5-moe", ALL_MODULES),
        ("hunyuan", ALL_MODULES),
        ("hunyuan-moe", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("deepseek-v2", LATENT_MODULES),
        ("glm4-moe-lite", LATENT_MODULES),
    ],
)
def test_further_decoders_take_adapters_with_the_fastest_backend(
    shape: str, modules: tuple[str, ...], checkpoint: CheckpointMaker, tmp_path: Path
) -> None:
    scene = AdapterScene(tmp_path, checkpoint(shape), {"a": {"modules": modules}})

    scene.run(scene.llm(attention_backend=cpu_backends()[-1]), [None, "a"], count=2)


@pytest.mark.refuses("adapters", shapes=["longcat-flash"])
def test_adapters_of_layers_that_are_numbered_in_pairs_are_refused(
    checkpoint: CheckpointMaker,
) -> None:
    with pytest.raises(ConfigError, match="enable_lora .*LongcatFlashForCausalLM"):
        LLM(str(checkpoint("longcat-flash")), enable_lora=True, skip_tokenizer_init=True)


@pytest.mark.proves("adapters", by="shape")
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("shape", ["qwen2-moe", "mixtral", "glm4-moe"])
def test_adapters_change_the_experts_of_mixtures(
    shape: str, backend: str, made: Callable[..., AdapterScene]
) -> None:
    """Adapters change single, joined and shared experts and their gates, in a batch with an adapter
    of attention only."""
    scene = made(shape)
    known = {"joined": str(scene.folders["joined"])}

    llm = scene.llm(attention_backend=backend, lora_modules=known)
    scene.run(llm, [None, "apart", "joined", "attention"], count=2)
    scene.run(llm, ["apart"], count=1)
    attention_first = scene.llm(attention_backend=backend)
    scene.run(attention_first, ["attention"], count=1)
    with pytest.raises(CheckpointError, match="changes experts, for which room is taken only"):
        scene.run(attention_first, ["apart"], count=1)


def test_adapters_take_turns_where_there_is_one_slot(scene: AdapterScene) -> None:
    llm = scene.llm(max_loras=1, max_cpu_loras=2)

    scene.run(llm, ["all", None, "some", "one"])
    for name in ("all", "some", "one", "all"):
        scene.run(llm, [name], count=1)


def test_an_evicted_adapter_is_read_again_but_one_in_host_memory_is_not(
    scene: AdapterScene,
) -> None:
    llm = scene.llm(max_loras=1, max_cpu_loras=2)
    adapters = llm.llm_engine.model.runner.adapters
    assert adapters is not None
    for name, loads in (("all", 1), ("some", 2), ("all", 2), ("one", 3), ("all", 3), ("some", 4)):
        scene.run(llm, [name], count=1)
        assert adapters.loads == loads


def test_the_least_recently_used_adapter_loses_its_slot() -> None:
    slots = LoRASlots((), 2, 4, torch.float32, torch.device("cpu"))
    for name in ("a", "b", "a"):
        slots.use([name])

    places, missing = slots.use(["c", "a"])

    assert missing == ("c",)
    assert set(slots.names) == places.keys() == {"a", "c"}
    assert len(set(places.values())) == 2


def test_a_released_slot_is_taken_before_another_adapter_is_evicted() -> None:
    slots = LoRASlots((), 2, 4, torch.float32, torch.device("cpu"))
    slots.use(["a", "b"])
    slots.release("b")
    slots.release("never used")

    slots.use(["c"])

    assert set(slots.names) == {"a", "c"}


def test_a_loaded_adapter_does_not_need_its_folder(scene: AdapterScene, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "gone", scene.checkpoint, **ADAPTERS["all"])
    llm = scene.llm(lora_modules={"all": str(folder)})
    for file in folder.iterdir():
        file.unlink()
    path = scene.paths("all")[0]

    (output,) = llm.generate(
        {"prompt_token_ids": list(path.prompt)},
        GREEDY,
        use_tqdm=False,
        lora_request=LoRARequest("all", 1, str(folder)),
    )

    assert tuple(output.outputs[0].token_ids) == path.output


@pytest.mark.parametrize("swap_space", [0.0, 0.01])
def test_preempted_requests_keep_their_adapters(scene: AdapterScene, swap_space: float) -> None:
    llm = scene.llm(
        num_blocks=24, block_size=4, max_model_len=64, max_loras=3, swap_space=swap_space
    )

    scene.run(llm, [None, "all", "some", "one"])

    stats = llm.llm_engine.model.engine.stats()
    assert stats.preemptions + stats.swaps > 0


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}},
        {"async_scheduling": True},
        {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    ],
    ids=["ngram", "draft", "async", "chunked"],
)
def test_adapters_work_with_other_features(scene: AdapterScene, options: dict[str, Any]) -> None:
    speculation = options.get("speculative_config", {})
    if speculation.get("method") == "draft_model":
        speculation = {**speculation, "model": str(scene.checkpoint)}
        options = {"speculative_config": speculation}

    scene.run(scene.llm(**options), [None, "all", "some"])


def test_adapters_share_no_cached_prefixes(scene: AdapterScene) -> None:
    llm = scene.llm(block_size=4, max_loras=3)
    prompt = TokensPrompt(prompt_token_ids=list(range(3, 43)))

    def cached(name: str | None) -> int:
        adapter = None if name is None else scene.requests[name]
        (output,) = llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=adapter)
        return output.num_cached_tokens

    names = (None, "all", "some")
    assert [cached(name) for name in names] == [0, 0, 0]
    assert [cached(name) for name in names] == [36, 36, 36]


def test_samples_beams_and_prompt_logprobs_equal_merged_weights(
    scene: AdapterScene, llm: LLM, tmp_path: Path
) -> None:
    folder = save_merged(tmp_path, scene.checkpoint, scene.folders["all"])
    merged = LLM(str(folder), skip_tokenizer_init=True, num_blocks=256, dtype="float32")
    prompt = TokensPrompt(prompt_token_ids=list(range(3, 30)))
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=LENGTH, prompt_logprobs=0)
    beams = BeamSearchParams(beam_width=3, max_tokens=LENGTH)
    adapter = scene.requests["all"]

    (expected,) = merged.generate(prompt, params, use_tqdm=False)
    (found,) = llm.generate(prompt, params, use_tqdm=False, lora_request=adapter)

    assert [one.token_ids for one in found.outputs] == [one.token_ids for one in expected.outputs]
    assert _prompt_logprobs(found) == pytest.approx(_prompt_logprobs(expected), abs=1e-4)
    (wanted,) = merged.beam_search(prompt, beams)
    (searched,) = llm.beam_search(prompt, beams, lora_request=adapter)
    assert [one.tokens for one in searched.sequences] == [one.tokens for one in wanted.sequences]


@pytest.mark.parametrize(
    "options", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}]
)
def test_bfloat16_and_int8_are_close_to_merged_weights(
    scene: AdapterScene, tmp_path: Path, options: dict[str, Any]
) -> None:
    folder = save_merged(tmp_path, scene.checkpoint, scene.folders["all"])
    prompt = TokensPrompt(prompt_token_ids=list(range(3, 60)))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    exact = LLM(str(folder), skip_tokenizer_init=True, num_blocks=64, dtype="float32")
    (expected,) = exact.generate(prompt, params, use_tqdm=False)
    (plain,) = scene.llm(**options).generate(prompt, params, use_tqdm=False)
    (found,) = scene.llm(**options).generate(
        prompt, params, use_tqdm=False, lora_request=scene.requests["all"]
    )

    error = _distance(_prompt_logprobs(found), _prompt_logprobs(expected))
    assert error < 0.3 < 1.0 < _distance(_prompt_logprobs(plain), _prompt_logprobs(expected))


def _prompt_logprobs(output: Any) -> list[float]:
    found = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [position[token].logprob for token, position in found]


def _distance(found: list[float], expected: list[float]) -> float:
    """The mean distance."""
    return sum(abs(a - b) for a, b in zip(found, expected, strict=True)) / len(found)


# Refusals


@cache
def _shapes(checkpoint: Path) -> Any:
    runner = LLM(str(checkpoint), skip_tokenizer_init=True, num_blocks=64).llm_engine.model.runner
    assert isinstance(runner.model, AdaptableModel)
    return runner.model.lora_shapes


@pytest.fixture
def adapter(scene: AdapterScene, tmp_path: Path) -> Path:
    return save_adapter(tmp_path / "adapter", scene.checkpoint, rank=4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
        ({"use_dora": True}, "use_dora must be unset, as DoRA"),
        ({"bias": "lora_only"}, "bias must be unset"),
        ({"lora_bias": True}, "lora_bias must be unset"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save must be unset"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out must be unset"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights must be one that leaves"),
        ({"r": 17}, "rank 17 of .* is over max_lora_rank 16"),
        ({"rank_pattern": {"q_proj": 99}}, "rank 99 of .*q_proj is over max_lora_rank 16"),
        ({"r": 0}, "r must be a whole number"),
        ({"r": "four"}, "r must be a whole number"),
        ({"lora_alpha": None}, "lora_alpha must be a number"),
        ({"alpha_pattern": {"(": 1.0}}, "alpha_pattern: '\\('"),
        ({"r": 5}, r"has shape \[4, .*ask for \[5, "),
    ],
)
def test_an_unsupported_adapter_config_is_refused_by_field(
    scene: AdapterScene, adapter: Path, fields: dict[str, Any], message: str
) -> None:
    write_config(adapter, **{"r": 4, "lora_alpha": 8, **fields})

    with pytest.raises((ConfigError, CheckpointError), match=message):
        AdapterFile(adapter, _shapes(scene.checkpoint), 16)


PATH = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{PATH}.lora_B.weight": None}, "lora_A.weight has no counterpart"),
        ({f"{PATH}.lora_B.weight": (64, 4)}, r"has shape \[64, 4\], but"),
        ({f"{PATH}.lora_magnitude_vector": (64,)}, "is not A or B of a module"),
        ({"base_model.model.lm_head.lora_A.weight": (4, 64)}, "lm_head cannot be served"),
        (
            {"base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight": (4, 64)},
            "experts",
        ),
        ({"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": (4, 64)}, "layer 9"),
        ({"vision.layers.0.self_attn.q_proj.lora_A.weight": (4, 64)}, "is not A or B"),
    ],
)
def test_tensors_without_a_place_in_the_model_are_refused_by_name(
    scene: AdapterScene, adapter: Path, change: dict[str, tuple[int, ...] | None], message: str
) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    for name, shape in change.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = torch.ones(shape)
    save_file(tensors, file)

    with pytest.raises(CheckpointError, match=message):
        AdapterFile(adapter, _shapes(scene.checkpoint), 16)


def test_broken_missing_and_pickled_files_are_refused(scene: AdapterScene, adapter: Path) -> None:
    shapes, file = _shapes(scene.checkpoint), adapter / "adapter_model.safetensors"

    file.write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        AdapterFile(adapter, shapes, 16)
    file.rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="is a pickle"):
        AdapterFile(adapter, shapes, 16)
    (adapter / "adapter_model.bin").unlink()
    with pytest.raises(CheckpointError, match="adapter_model.safetensors is missing"):
        AdapterFile(adapter, shapes, 16)
    (adapter / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="adapter_config.json"):
        AdapterFile(adapter, shapes, 16)
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match="adapter_config.json is missing"):
        AdapterFile(adapter, shapes, 16)


def test_settings_that_contradict_each_other_are_refused() -> None:
    plain = EngineConfig(model="m", enable_lora=True)
    for change, message in (
        ({"max_loras": 0}, "max_loras must be at least 1"),
        ({"max_lora_rank": 0}, "max_lora_rank must be at least 1"),
        ({"max_loras": 3, "max_cpu_loras": 2}, "max_cpu_loras must be at least max_loras"),
        ({"enable_lora": False, "lora_modules": {"a": "b"}}, "enable_lora is off"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(plain, **change)


def test_adapters_are_not_deterministic_on_a_cpu(scene: AdapterScene) -> None:
    with pytest.raises(ConfigError, match="enable_lora and deterministic go together"):
        scene.llm(deterministic=True)


def test_a_model_without_native_path_takes_no_adapters(checkpoint: CheckpointMaker) -> None:
    with pytest.raises(ConfigError, match="enable_lora needs the native implementation"):
        LLM(str(checkpoint("gpt_neox")), skip_tokenizer_init=True, enable_lora=True, num_blocks=64)


def test_requests_for_adapters_that_cannot_run_are_refused(scene: AdapterScene, llm: LLM) -> None:
    prompt = TokensPrompt(prompt_token_ids=[3, 4])
    without = scene.llm(enable_lora=False)
    with pytest.raises(RequestError, match="enable_lora=True"):
        without.generate(prompt, GREEDY, lora_request=scene.requests["all"])
    with pytest.raises(RequestError, match="2 entries for 1 prompts"):
        llm.generate(prompt, GREEDY, lora_request=[None, None])
    llm.generate(prompt, GREEDY, lora_request=scene.requests["all"])  # gives the name its folder
    with pytest.raises(CheckpointError, match="give .* a name of its own"):
        other = str(scene.folders["some"])
        llm.generate(prompt, GREEDY, lora_request=LoRARequest("all", 1, other))
    with pytest.raises(RequestError, match="lora_int_id must be above 0"):
        LoRARequest("all", 0, "folder")
