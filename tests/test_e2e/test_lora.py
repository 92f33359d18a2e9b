"""LoRA adapters as models of the API: real engine, gateway and Valkey, through the OpenAI SDK."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from headrace_testing.adapters import save_adapter, save_merged
from headrace_testing.checkpoints import GreedyPath, Reference
from headrace_testing.headrace_up import MODEL as UP_MODEL
from headrace_testing.headrace_up import UpProcess
from headrace_testing.processes import Starter
from headrace_testing.stack import MODEL, EngineProcess, GatewayProcess
from headrace_testing.valkey import ValkeyServer

LENGTH = 12
SQL, CHAT = "tiny-sql", "org/chat"
Tokens = tuple[int, ...]
Paths = dict[str, list[GreedyPath]]


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(folder / f"adapter-{seed}", checkpoint, seed=seed)
        for seed, name in enumerate((SQL, CHAT))
    }


@pytest.fixture(scope="module")
def expected(
    checkpoint: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Paths:
    """Prompts of each model with transformers' greedy tokens on its merged weights."""
    merged = {
        name: save_merged(tmp_path_factory.mktemp("merged"), checkpoint, folder)
        for name, folder in folders.items()
    }
    return {
        name: Reference(folder).clear_paths(2, LENGTH)
        for name, folder in {MODEL: checkpoint, **merged}.items()
    }


@pytest.fixture(scope="module")
def url(
    checkpoint: Path,
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    start: Starter,
) -> Iterator[str]:
    """The URL of a gateway that knows models only through the one engine with the adapters."""
    logs = tmp_path_factory.mktemp("logs")
    valkey = ValkeyServer(logs / "valkey")
    valkey.start()
    modules = [f"--lora-modules={name}={folder}" for name, folder in folders.items()]
    flags = ("--enable-lora", "--max-loras", "2", *modules)
    with (
        GatewayProcess(None, valkey.url, logs / "gateway", start=start) as gateway,
        EngineProcess(checkpoint, valkey.url, logs / "engine", *flags, start=start) as engine,
    ):
        gateway.await_log("gateway ready")
        engine.await_log("engine ready")
        yield gateway.url
    valkey.stop()


def all_tokens(client: OpenAI, work: list[tuple[str, GreedyPath]]) -> list[tuple[str, Tokens]]:
    """The tokens of all prompts in one call."""

    def complete(work: tuple[str, GreedyPath]) -> tuple[str, Tokens]:
        name, path = work
        answer = client.completions.create(
            model=name,
            prompt=list(path.prompt),
            temperature=0,
            max_tokens=LENGTH,
            extra_body={"min_tokens": LENGTH, "return_token_ids": True},
        )
        extra = answer.choices[0].model_extra
        assert extra is not None
        return answer.model, tuple(extra["token_ids"])

    with ThreadPoolExecutor(len(work)) as pool:
        return list(pool.map(complete, work))


def test_adapters_are_listed_as_models_with_their_base_model(url: str, expected: Paths) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=120) as client:
        work = [(name, expected[name][index]) for index in range(2) for name in expected]

        assert all_tokens(client, work) == [(name, path.output) for name, path in work]
        cards = {model.id: model.model_extra or {} for model in client.models.list()}
        assert {name: card["parent"] for name, card in cards.items()} == {
            MODEL: None,
            SQL: MODEL,
            CHAT: MODEL,
        }
        assert client.models.retrieve(CHAT).model_extra == {**cards[CHAT]}
        with pytest.raises(
            NotFoundError, match="'other' is not served here; served: tiny, tiny-sql"
        ):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(BadRequestError, match="this model makes text"):
            client.embeddings.create(model=SQL, input="x")


def test_two_processes_share_a_model_with_adapters(
    checkpoint: Path, folders: dict[str, Path], expected: Paths, tmp_path: Path
) -> None:
    """The processes are started as a user would; both adapters take turns in one slot."""
    modules = [f"--lora-modules={name}={folder}" for name, folder in folders.items()]
    flags = ("--model", str(checkpoint), "--served-model-name", UP_MODEL, "--")
    ranks = ("--tensor-parallel-size", "2", "--threads", "1", "--dtype", "float32")
    work = [(name, expected[name][index]) for index in range(2) for name in (SQL, CHAT, MODEL)]

    with UpProcess(tmp_path, *flags, *ranks, "--enable-lora", *modules) as up:
        up.until_served()
        assert up.child("headrace_engine.distributed").is_running()
        with OpenAI(base_url=f"{up.url}/v1", api_key="x", max_retries=0, timeout=120) as client:
            renamed = [(UP_MODEL if name == MODEL else name, path) for name, path in work]
            found = all_tokens(client, renamed)

    assert found == [(name, path.output) for name, path in renamed]
