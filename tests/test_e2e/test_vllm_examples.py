"""vLLM's published examples, unchanged except for import, model and URL.

They run if VLLM_EXAMPLES names their folder. Without it, the calls that they make are tested in
tests/test_engine/offline and tests/test_gateway.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from headrace_common.text.checkpoint import demo_folder
from headrace_testing.adapters import save_adapter
from headrace_testing.checkpoints import save_checkpoint
from headrace_testing.embedders import save_embedder
from headrace_testing.headrace_up import UpProcess
from headrace_testing.tool_templates import CHATML_WITH_TOOLS
from headrace_testing.vllm_examples import (
    ADAPTED,
    ADAPTER,
    AGENT,
    DEMO,
    EMBEDDER,
    LONG,
    OFFLINE,
    ONLINE,
    VARIABLE,
    Example,
    offline_text,
    online_text,
    run,
)

EXAMPLES = os.environ.get(VARIABLE)
# The fixture of the server for each model; other models use `served`.
SERVERS = {EMBEDDER: "served_embedder", AGENT: "served_agent"}
pytestmark = pytest.mark.skipif(EXAMPLES is None, reason=f"{VARIABLE} names no folder")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    folder = tmp_path_factory.mktemp("models")
    adapted = save_checkpoint(folder / ADAPTED, "llama", vocab_size=32_064)
    embedder = save_embedder(folder / EMBEDDER, "qwen3", "lasttoken", vocab_size=2048)
    # its vocabulary has the bytes of all texts
    shutil.copy(demo_folder() / "tokenizer.json", embedder)
    return {
        DEMO: "headrace-demo",
        LONG: str(save_checkpoint(folder / LONG, "llama", max_position_embeddings=16_384)),
        EMBEDDER: str(embedder),
        ADAPTED: str(adapted),
        ADAPTER: str(save_adapter(folder / ADAPTER, adapted)),
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with UpProcess(tmp_path_factory.mktemp("up")) as up:
        up.until_served()
        yield up.url


@pytest.fixture(scope="module")
def served_embedder(
    models: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    arguments = ("--model", models[EMBEDDER], "--served-model-name", "headrace-demo")
    pooler = ("--pooler-config", '{"matryoshka_dimensions": [32]}')
    with UpProcess(tmp_path_factory.mktemp("up"), *arguments, *pooler) as up:
        up.until_served()
        yield up.url


@pytest.fixture(scope="module")
def served_agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The demo model behind a chat template with tools; all its output is reasoning."""
    folder = tmp_path_factory.mktemp("agent")
    model = shutil.copytree(demo_folder(), folder / "model")
    (model / "chat_template.jinja").write_text(CHATML_WITH_TOOLS)
    arguments = ("--model", str(model), "--served-model-name", "headrace-demo")
    parser = {"HEADRACE_GATEWAY_REASONING_PARSER": "deepseek_r1"}
    with UpProcess(folder, *arguments, env=parser) as up:
        up.until_served()
        yield up.url


@pytest.mark.timeout(400)
@pytest.mark.parametrize("example", OFFLINE, ids=lambda each: each.path)
def test_an_offline_example_runs(
    example: Example, models: Mapping[str, str], tmp_path: Path
) -> None:
    text = (Path(str(EXAMPLES)) / "offline_inference" / example.path).read_text()

    printed = run(offline_text(text, example, models), example, models, tmp_path)

    assert re.search(example.shows, printed), printed


@pytest.mark.timeout(400)
@pytest.mark.parametrize("example", ONLINE, ids=lambda each: " ".join((each.path, *each.arguments)))
def test_an_example_of_a_client_runs(
    example: Example, models: Mapping[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url: str = request.getfixturevalue(SERVERS.get(example.model, "served"))
    text = (Path(str(EXAMPLES)) / "online_serving" / example.path).read_text()

    printed = run(online_text(text, url), example, models, tmp_path)

    assert re.search(example.shows, printed, re.MULTILINE), printed
