"""Draws a report of `peers.py` as bars: how many times as fast as each peer Headrace is.

python benchmarks/peers_plot.py docs/performance/peers-2026-11-21.json docs/peers.png
"""

import argparse
import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from PIL import Image

# Key of the report's ratios, and its label. Start-up time and memory would need another axis.
ROWS = {
    "small-64/vllm-tuned": "64 requests at once, 42 M (vLLM)",
    "half-16/vllm-tuned": "16 requests at once, 0.4 B (vLLM)",
    "half-64/vllm-tuned": "64 requests at once, 0.4 B (vLLM)",
    "small-long/vllm-tuned": "8 prompts of 8,000 tokens, 42 M (vLLM)",
    "http-32-requests_per_s/vllm-tuned": "HTTP, 32 in flight: requests/s (vLLM)",
    "http-32-ttft_p99_ms/vllm-tuned": "HTTP: time to first token, p99 (vLLM)",
    "http-32-itl_p99_ms/vllm-tuned": "HTTP: inter-token latency, p99 (vLLM)",
    "small-1/llama.cpp-bf16": "one request alone, 42 M (llama.cpp)",
    "half-1/llama.cpp-bf16": "one request alone, 0.4 B (llama.cpp)",
    "small-1-int8/llama.cpp-q8_0": "one request alone, 42 M, 8 bits (llama.cpp)",
    "half-1-int8/llama.cpp-q8_0": "one request alone, 0.4 B, 8 bits (llama.cpp)",
}
_BAR, _PEER = "#00796b", "#9e9e9e"


def draw(ratios: Mapping[str, float], machine: str, file: Path) -> None:
    """Writes the picture. Raises KeyError where the report lacks a row."""
    values = [ratios[key] for key in ROWS]
    figure, axes = plt.subplots(figsize=(8, 0.32 * len(values) + 0.9), layout="constrained")
    places = range(len(values))
    axes.barh(places, values, color=_BAR, height=0.62)
    axes.axvline(1, color=_PEER, linewidth=1.5)
    axes.text(1, -0.75, "the peer", color=_PEER, ha="center", va="bottom", fontsize=8)
    for place, value in zip(places, values, strict=True):
        axes.text(value + 0.02, place, f"{value:.2f}x", va="center", fontsize=9)
    axes.set_yticks(places, list(ROWS.values()), fontsize=8)
    axes.set_ylim(len(values) - 0.4, -0.8)
    axes.set_xlim(0, max(values) * 1.12)
    axes.set_xlabel(f"times as fast as the peer ({machine})", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, file, dpi=150)


def save(figure: Figure, file: Path, dpi: int) -> None:
    """Writes a picture of few colours, and closes it."""
    drawn = BytesIO()
    figure.savefig(drawn, dpi=dpi)
    plt.close(figure)
    Image.open(drawn).convert("RGB").quantize(32).save(file, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    report = json.loads(options.report.read_text())
    machine = report["machine"]
    text = f"{machine['cores']} cores of {machine['processor']}, {report['date']}"
    draw(report["ratios"], text, options.picture)


if __name__ == "__main__":
    main()
