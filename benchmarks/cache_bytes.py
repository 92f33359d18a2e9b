"""Prints the bytes that published models cache for a token and for a sequence.

    python benchmarks/cache_bytes.py

Each config.json in tests/test_engine/models/published is read as an engine reads it, without
weights. The last column has what the paper of the model says about a token.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from headrace_engine.checkpoints.checkpoint import load_checkpoint
from headrace_engine.model_loader.describe_model import Description, describe

PUBLISHED = Path(__file__).parents[1] / "tests" / "test_engine" / "models" / "published"
# "Insights into DeepSeek-V3" (arXiv 2505.09343), table 1, and "Kimi Linear" (arXiv 2510.26692):
# against latents in all 27 layers.
PAPERS = {
    "deepseek-ai--DeepSeek-V3": "70.272 KB",
    "meta-llama--Meta-Llama-3.1-405B": "516.096 KB",
    "moonshotai--Kimi-Linear-48B-A3B-Instruct": "up to 75% less than 31.104 KB",
}


def described(name: str) -> Description:
    """What an engine finds in a published config.json alone, in bfloat16."""
    config = json.loads((PUBLISHED / f"{name}.json").read_text())["config"]
    for part in (config, config.get("text_config", {})):
        part["dtype"] = "bfloat16"
        part.pop("quantization_config", None)
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return describe(load_checkpoint(folder))


def main() -> None:
    print("| model | KV of a token | state of a sequence | published |")
    print("| --- | ---: | ---: | --- |")
    for path in sorted(PUBLISHED.glob("*.json")):
        found = described(path.stem)
        state = f"{found.state_bytes_per_sequence:,}" if found.state_bytes_per_sequence else ""
        cells = (f"{found.kv_bytes_per_token:,}", state, PAPERS.get(path.stem, ""))
        print("|", " | ".join((path.stem.replace("--", "/"), *cells)), "|", flush=True)


if __name__ == "__main__":
    main()
