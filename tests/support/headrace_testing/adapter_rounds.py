"""Adapters added and removed under load on real processes: every answer is compared.

`python -m headrace_testing.adapter_rounds --rounds 100` runs it and prints its figures.
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import torch

from .adapters import save_adapter, save_merged
from .checkpoints import MARGIN, VOCAB, Reference, save_checkpoint
from .processes import Starter, start_program, until
from .stack import MODEL, EngineProcess, Stack

LENGTH = 24
PROMPTS = 2
Tokens = tuple[int, ...]
KINDS = 4  # different adapters
NAMES = 3  # names of adapters that are loaded at the same time, at most
CLIENTS = 4
LIMIT_S = 120.0
_BODY = {
    "temperature": 0,
    "max_tokens": LENGTH,
    "min_tokens": LENGTH,
    "return_token_ids": True,
}


@dataclass(frozen=True, slots=True)
class Scene:
    """A checkpoint, folders of adapters, prompts, and each one's right tokens by the kind of
    adapter; None: without one."""

    checkpoint: Path
    root: Path
    folders: Sequence[Path]
    prompts: Sequence[Tokens]
    outputs: Sequence[Mapping[int | None, Tokens]]


def make_scene(checkpoint: Path, folder: Path) -> Scene:
    """Makes adapters, and asks transformers for the tokens of the merged weights.

    Prompts with near-ties are left out.
    """
    root = folder / "adapters"
    folders = [save_adapter(root / str(kind), checkpoint, seed=kind) for kind in range(KINDS)]
    references: dict[int | None, Reference] = {
        kind: Reference(save_merged(folder / f"merged-{kind}", checkpoint, each))
        for kind, each in enumerate(folders)
    }
    references[None] = Reference(checkpoint)
    generator = torch.Generator().manual_seed(1)
    prompts: list[Tokens] = []
    outputs: list[Mapping[int | None, Tokens]] = []
    while len(prompts) < PROMPTS:
        prompt = tuple(torch.randint(3, VOCAB, (12,), generator=generator).tolist())
        paths = {kind: each.path(prompt, LENGTH) for kind, each in references.items()}
        if min(path.margin for path in paths.values()) > MARGIN:
            prompts.append(prompt)
            outputs.append({kind: path.output for kind, path in paths.items()})
    return Scene(checkpoint, root, folders, prompts, outputs)


@dataclass
class Served:
    """What clients may ask for: by name, the kinds of adapters that may answer. `sending` counts
    requests that are not accepted yet."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    kinds: dict[str, set[int | None]] = field(default_factory=lambda: {MODEL: {None}})
    sending: dict[str, int] = field(default_factory=dict)
    ended: bool = False

    def choose(self, number: int) -> tuple[str, set[int | None]]:
        """The name for a client's next request, which is then being sent, and the kinds that may
        answer it; more are added while it runs, if an adapter is replaced."""
        with self.changed:
            name = sorted(self.kinds)[number % len(self.kinds)]
            self.sending[name] = self.sending.get(name, 0) + 1
            return name, self.kinds[name]

    def accepted(self, name: str) -> None:
        with self.changed:
            self.sending[name] -= 1
            self.changed.notify_all()

    def open(self, name: str, kind: int) -> None:
        """From now on, this kind alone answers."""
        with self.changed:
            self.kinds[name] = {kind}

    def also(self, name: str, kind: int) -> None:
        """From now on, this kind may answer as well."""
        with self.changed:
            self.kinds[name].add(kind)

    def close(self, name: str) -> None:
        """No client asks for the name any more. Returns when all requests for it are accepted."""
        with self.changed:
            del self.kinds[name]
            assert self.changed.wait_for(lambda: not self.sending.get(name), LIMIT_S)


@dataclass
class Figures:
    """What happened. `seconds` are those of the calls that load an adapter."""

    rounds: int = 0
    answers: int = 0
    adapted: int = 0
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    took: float = 0.0

    def summary(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "answers": self.answers,
            "answers_with_adapters": self.adapted,
            "refused": len(self.refused),
            "wrong": len(self.wrong),
            "load_seconds_median": round(statistics.median(self.seconds), 3),
            "load_seconds_largest": round(max(self.seconds), 3),
            "seconds": round(self.took, 1),
        }


class AdapterRounds:
    """Three engines and two gateways under load, while adapters are added and removed."""

    def __init__(self, scene: Scene, folder: Path, start: Starter = start_program) -> None:
        self._scene = scene
        self.stack = Stack(scene.checkpoint, folder, start=start)
        self.served, self.figures = Served(), Figures()
        self._numbers = count()
        self._names: list[str] = []  # of loaded adapters, the oldest first

    def start(self) -> None:
        for _ in range(2):
            self.stack.add_gateway("--allow-runtime-lora-updating", "--lora-load-timeout", "110")
        for _ in range(3):
            self.add_engine()
        self.stack.await_engines(3)

    def add_engine(self) -> EngineProcess:
        flags = ("--enable-lora", "--max-loras", "2", "--lora-dir", str(self._scene.root))
        return self.stack.add_engine(*flags)

    def run(self, rounds: int) -> Figures:
        """Each round loads an adapter, under a new name or, every fourth round, in place of another
        one; a third of the way through an engine is killed, and later one is started."""
        begun = time.monotonic()
        with self._load():
            for number in range(rounds):
                if number == rounds // 3:
                    self.stack.retire(self.stack.engines[0])
                if number == rounds // 2:
                    self.add_engine()
                self._round(number)
            self.stack.await_engines(3)
            self._more_answers()
        self.figures.took = time.monotonic() - begun
        return self.figures

    def _round(self, number: int) -> None:
        kind, replaces = number % KINDS, number % 4 == 3
        if not replaces:
            self._names.append(f"adapter-{number}")
        name = self._names[-1]
        if replaces:  # until all gateways know, either version answers
            self.served.also(name, kind)
        elif len(self._names) > NAMES:
            oldest = self._names.pop(0)
            self.served.close(oldest)
            self._change(number, "unload", lora_name=oldest)
        body = {"lora_name": name, "lora_path": str(self._scene.folders[kind])}
        begun = time.monotonic()
        self._change(number, "load", **body, load_inplace=replaces)
        self.figures.seconds.append(time.monotonic() - begun)
        for gateway in self.stack.gateways:
            url = gateway.url
            until(lambda url=url: self._is_served(url, name, kind), f"{name} by {url}")  # type: ignore[misc]
        self.served.open(name, kind)
        self.figures.rounds += 1
        self._more_answers()

    def _is_served(self, url: str, name: str, kind: int) -> bool:
        """Whether a gateway lists an adapter and gives answers of its new version."""
        if name not in _names(url):
            return False
        body = {**_BODY, "model": name, "prompt": self._scene.prompts[0]}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S)
        assert answer.status_code == 200, answer.text
        return tuple(_tokens(answer.json())) == self._scene.outputs[0][kind]

    def _change(self, number: int, what: str, **body: Any) -> None:
        url = self.stack.gateways[number % 2].url
        answer = httpx.post(f"{url}/v1/{what}_lora_adapter", json=body, timeout=LIMIT_S)
        assert answer.status_code == 200, answer.text

    def _more_answers(self) -> None:
        """Waits until every client has got some more answers."""
        wanted = self.figures.answers + 2 * CLIENTS

        def enough() -> bool:
            return self.figures.answers >= wanted or bool(self.figures.refused)

        until(enough, "more answers")

    @contextmanager
    def _load(self) -> Iterator[None]:
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self._client) for _ in range(CLIENTS)]
            try:
                yield
            finally:
                self.served.ended = True
            for client in clients:
                client.result()

    def _client(self) -> None:
        with httpx.Client(timeout=LIMIT_S) as http:
            while not self.served.ended:
                self._ask(http, next(self._numbers))

    def _ask(self, http: httpx.Client, number: int) -> None:
        name, kinds = self.served.choose(number)
        index = number // CLIENTS % PROMPTS
        body = {**_BODY, "model": name, "prompt": self._scene.prompts[index], "stream": True}
        url = f"{self.stack.gateways[number // 2 % 2].url}/v1/completions"
        tokens: list[int] = []
        with http.stream("POST", url, json=body) as answer:
            self.served.accepted(name)
            if answer.status_code != 200:
                self.figures.refused.append(f"{name}: {answer.read().decode()}")
                return
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    tokens += _tokens(json.loads(line.removeprefix("data: ")))
        self._check(name, index, tuple(tokens), kinds)

    def _check(self, name: str, index: int, tokens: Tokens, kinds: set[int | None]) -> None:
        with self.served.changed:
            right = [self._scene.outputs[index][kind] for kind in kinds]
            self.figures.answers += 1
            self.figures.adapted += name != MODEL
            if tokens not in right:
                self.figures.wrong.append(f"{name}: {tokens}, not one of {right}")

    def close(self) -> None:
        self.stack.close()


def _names(url: str) -> set[str]:
    return {each["id"] for each in httpx.get(f"{url}/v1/models", timeout=LIMIT_S).json()["data"]}


def _tokens(event: dict[str, Any]) -> list[int]:
    assert "error" not in event, event
    return [token for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()]


def main() -> None:
    """Runs the rounds and prints the figures; exits with 1 if an answer was wrong or refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = save_checkpoint(folder / "model", "llama", max_position_embeddings=1024)
        run = AdapterRounds(make_scene(checkpoint, folder), folder)
        try:
            run.start()
            figures = run.run(rounds)
        finally:
            run.close()
    lines = (json.dumps(figures.summary(), indent=2), *figures.refused, *figures.wrong)
    sys.stdout.write("\n".join(lines) + "\n")
    raise SystemExit(bool(figures.refused or figures.wrong))


if __name__ == "__main__":
    main()
