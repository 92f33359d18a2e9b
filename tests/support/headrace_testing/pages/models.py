"""Writes the table of docs/models.md: the native architectures, and what tests prove of each.

A cell says what the marks of tests say (`headrace_testing.proofs`). A test compares the page with
the one made here; `make generated` renews it.
"""

from collections.abc import Collection, Mapping

import transformers
from transformers.models.auto import modeling_auto

from ..checkpoints import SHAPES
from ..proofs import ROOT, Kind, Proof, proofs

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"
COLUMNS: dict[Kind, str] = {
    "images": "[images](#images)",
    "native call": "one native call a step, on CPUs",
    "quantised": "quantised",
    "ranks": "ranks",
    "adapters": "adapters",
    "mtp": "MTP head",
}
_TEXT_ONLY = "text only: the vision tower is not read"
_LATENT = "[latent attention](memory.md#latents)"
_INDEXED = "latent attention to [keys that an indexer chooses](memory.md#latents)"
# The models of each native architecture, in the order of the table.
MODELS: dict[str, str] = {
    "LlamaForCausalLM": "Llama 1-3, and many others",
    "Llama4ForCausalLM": "Llama 4, with [attention in chunks](#sliding-windows)",
    "Llama4ForConditionalGeneration": "Llama 4 as published, with a vision tower",
    "MistralForCausalLM": "Mistral",
    "Ministral3ForCausalLM": "Ministral",
    "Mistral3ForConditionalGeneration": "Mistral Small from 3.1 on and Ministral 3",
    "Qwen2ForCausalLM": "Qwen 2 and 2.5",
    "Qwen3ForCausalLM": "Qwen 3",
    "Qwen2VLForConditionalGeneration": "Qwen 2 VL",
    "Qwen2_5_VLForConditionalGeneration": "Qwen 2.5 VL",
    "Qwen3VLForConditionalGeneration": "Qwen 3 VL without experts",
    "Glm4vForConditionalGeneration": "GLM-4.1V",
    "Glm46VForConditionalGeneration": "GLM-4.6V without experts (Flash)",
    "Glm4vMoeForConditionalGeneration": "GLM-4.5V and 4.6V, with experts",
    "Idefics3ForConditionalGeneration": "Idefics 3",
    "SmolVLMForConditionalGeneration": "SmolVLM",
    "LlavaOnevisionForConditionalGeneration": "LLaVA-OneVision",
    "MiMoForCausalLM": "MiMo-7B",
    "Phi3ForCausalLM": "Phi-3, Phi-3.5, Phi-4",
    "GemmaForCausalLM": "Gemma 1",
    "Gemma2ForCausalLM": "Gemma 2",
    "Gemma3ForCausalLM": "Gemma 3",
    "Gemma3ForConditionalGeneration": "Gemma 3 of 4B and larger",
    "SmolLM3ForCausalLM": "SmolLM 3",
    "Olmo2ForCausalLM": "OLMo 2",
    "Olmo3ForCausalLM": "OLMo 3",
    "GraniteForCausalLM": "Granite, dense models without Mamba layers",
    "GlmForCausalLM": "GLM-4 9B",
    "Glm4ForCausalLM": "GLM-4 32B",
    "Exaone4ForCausalLM": "EXAONE 4",
    "Ernie4_5ForCausalLM": "ERNIE 4.5, dense",
    "SeedOssForCausalLM": "Seed-OSS",
    "MixtralForCausalLM": "Mixtral",
    "Qwen2MoeForCausalLM": "Qwen 2's mixtures of experts",
    "Qwen3MoeForCausalLM": "Qwen 3's mixtures of experts",
    "GptOssForCausalLM": "gpt-oss",
    "Glm4MoeForCausalLM": "GLM-4.5 and 4.6",
    "SolarOpenForCausalLM": "Solar Open",
    "Dots1ForCausalLM": "dots.llm1",
    "MiniMaxM2ForCausalLM": "MiniMax-M2",
    "MiMoV2FlashForCausalLM": "MiMo-V2-Flash",
    "OlmoeForCausalLM": "OLMoE",
    "Ernie4_5_MoeForCausalLM": "ERNIE 4.5's mixtures",
    "HunYuanDenseV1ForCausalLM": "Hunyuan, dense",
    "HunYuanMoEV1ForCausalLM": "Hunyuan's mixtures",
    "DeepseekV2ForCausalLM": f"DeepSeek V2: {_LATENT}",
    "DeepseekV3ForCausalLM": f"DeepSeek V3 and R1, Kimi K2: {_LATENT}",
    "DeepseekV32ForCausalLM": f"DeepSeek V3.2: {_INDEXED}",
    "GlmMoeDsaForCausalLM": f"GLM-5: {_INDEXED}",
    "LongcatFlashForCausalLM": f"LongCat-Flash: {_LATENT}",
    "Glm4MoeLiteForCausalLM": f"GLM-4.7-Flash: {_LATENT}",
    "KimiK25ForConditionalGeneration": f"Kimi K2.5 under its published name, {_TEXT_ONLY}",
    "Kimi_K25ForConditionalGeneration": f"Kimi K2.5 under transformers' name, {_TEXT_ONLY}",
    "BambaForCausalLM": "Bamba, with [Mamba-2 layers](#recurrent-layers)",
    "FalconH1ForCausalLM": "Falcon-H1, with attention and Mamba-2 side by side in each layer",
    "FalconMambaForCausalLM": "Falcon-Mamba, without attention",
    "GraniteMoeHybridForCausalLM": "Granite 4-H, with Mamba-2 layers",
    "JambaForCausalLM": "Jamba, with Mamba layers",
    "KimiLinearForCausalLM": f"Kimi Linear, with Kimi Delta Attention and {_LATENT}",
    "Lfm2ForCausalLM": "LFM2, with [short convolutions](#recurrent-layers)",
    "Lfm2MoeForCausalLM": "LFM2's mixtures of experts",
    "MambaForCausalLM": "Mamba, without attention: a sequence takes the same memory at any length",
    "Mamba2ForCausalLM": "Mamba 2, without attention",
    "NemotronHForCausalLM": "Nemotron-H and Nemotron 3, with and without experts",
    "Qwen3NextForCausalLM": "Qwen3-Next, with [gated delta nets](#recurrent-layers)",
    "Qwen3_5ForCausalLM": "Qwen 3.5 without experts",
    "Qwen3_5ForConditionalGeneration": "Qwen 3.5 without experts",
    "Qwen3_5MoeForCausalLM": "Qwen 3.5 with experts",
    "Qwen3_5MoeForConditionalGeneration": "Qwen 3.5 with experts",
}


def architecture_of(shape: str) -> str:
    """The architecture that transformers writes into a shape's config.json."""
    kind = getattr(transformers, SHAPES[shape].config)
    multimodal = "vision_config" in SHAPES[shape].options
    names: Mapping[str, str] = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        if multimodal
        else modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    return names[kind.model_type]


def proven(found: Collection[Proof]) -> dict[tuple[str, str], bool]:
    """Whether each (architecture, kind) that tests are about works or is refused.

    Raises ValueError if one test proves what another one refuses, or names an architecture that is
    not in the table.
    """
    made: dict[tuple[str, str], bool] = {}
    for proof in found:
        name = proof.model if proof.published else architecture_of(proof.model)
        if proof.published and name not in MODELS:
            raise ValueError(f"{name} is not in the table, but a test is about it")
        if made.setdefault((name, proof.kind), proof.works) != proof.works:
            raise ValueError(f"{name}: tests prove {proof.kind}, and that it is refused")
    return made


def table(known: Mapping[tuple[str, str], bool]) -> str:
    """The table. Raises ValueError if no test compares an architecture's tokens."""
    unknown = [name for name in MODELS if not known.get((name, "tokens"))]
    if unknown:
        raise ValueError(f"no test compares the tokens of {', '.join(unknown)}")
    head = ("`architectures` in config.json", "models", *COLUMNS.values())
    rows = [head, ("---",) * len(head)]
    for name, models in MODELS.items():
        cells = [known.get((name, kind)) for kind in COLUMNS]
        words = ("" if cell is None else "yes" if cell else "no" for cell in cells)
        rows.append((f"`{name}`", models, *words))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def page(text: str, known: Mapping[tuple[str, str], bool]) -> str:
    """The page with its table renewed."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(known)}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), proven(proofs())))
