"""Two ranks under random arrivals, aborts and steps, with so few blocks that sequences are
preempted. Hypothesis drives an engine whose model is divided; an engine in one process, with room
for all, gives the expected tokens of each request. Ranks are threads with real collectives; of
three adapters the divided model has room for two."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from headrace_common.sampling.params import SamplingParams
from headrace_engine.core.config import EngineConfig
from headrace_engine.core.request import EngineRequest
from headrace_engine.core.speculative_config import SpeculativeConfig
from headrace_engine.engine.engine import Engine
from headrace_engine.model_runner.model_runner import ModelRunner
from headrace_engine.scheduler.policies import POLICIES
from headrace_testing.adapter_scenes import ADAPTERS, AdapterScene
from headrace_testing.engines import engine_config, run
from headrace_testing.rank_threads import RankThread

SHARED = tuple(range(30, 46))
NGRAM = SpeculativeConfig(method="ngram", prompt_lookup_min=1, adaptive=False)


@dataclass(frozen=True, slots=True)
class Bench:
    """A divided model and a whole one, with the configurations of their engines."""

    config: EngineConfig
    ranks: ModelRunner
    alone_config: EngineConfig
    alone: ModelRunner


@pytest.fixture(scope="module")
def bench(adapter_scene: AdapterScene) -> Iterator[Bench]:
    folder = adapter_scene.checkpoint
    adapters: dict[str, Any] = {
        "enable_lora": True,
        "lora_modules": {name: str(path) for name, path in adapter_scene.folders.items()},
    }
    config = engine_config(
        folder,
        **adapters,
        max_loras=2,
        tensor_parallel_size=2,
        threads=1,
        num_blocks=16,
        watermark=0.0,
        swap_space=0.01,
        async_scheduling=True,
    )
    ranks = ModelRunner(config, launch=RankThread)
    alone = engine_config(folder, **adapters, max_loras=len(ADAPTERS))
    yield Bench(config, ranks, alone, ModelRunner(alone))
    assert ranks.peers is not None
    ranks.peers.close()


class RanksMachine(RuleBasedStateMachine):
    bench: ClassVar[Bench]

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, EngineRequest] = {}
        self.aborted: set[str] = set()
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        budget=st.sampled_from([5, 24, 64]),
        max_num_seqs=st.integers(1, 6),
        drafts=st.booleans(),
    )
    def start(self, policy: str, budget: int, max_num_seqs: int, drafts: bool) -> None:
        config = replace(
            self.bench.config,
            policy=policy,
            max_num_batched_tokens=budget,
            max_num_seqs=min(max_num_seqs, budget),
            # without speculation: steps ahead of each other
            speculative_config=NGRAM if drafts else None,
        )
        self.engine = Engine(config, self.bench.ranks)

    @rule(
        shared=st.integers(0, len(SHARED)),
        own=st.lists(st.integers(1, 60), min_size=1, max_size=6),
        n=st.sampled_from([1, 1, 2, 3]),
        temperature=st.sampled_from([0.0, 0.9]),
        length=st.integers(1, 10),
        priority=st.integers(-1, 1),
        penalty=st.sampled_from([1.0, 1.3]),
        lora=st.sampled_from([None, None, *ADAPTERS]),
    )
    def add(
        self,
        shared: int,
        own: list[int],
        n: int,
        temperature: float,
        length: int,
        priority: int,
        penalty: float,
        lora: str | None,
    ) -> None:
        number = len(self.requests)
        params = SamplingParams(
            n=n, temperature=temperature, max_tokens=length, repetition_penalty=penalty
        )
        request = EngineRequest(
            request_id=f"r{number}",
            prompt_token_ids=(*SHARED[:shared], *own),
            params=params,
            seed=number,
            priority=priority,
            lora=lora,
        )
        self.requests[request.request_id] = request
        self.engine.add_request(request)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self.engine.has_work:
                self.one_step()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.requests:
            name = data.draw(st.sampled_from(sorted(self.requests)))
            self.engine.abort(name)
            self.aborted.add(name)

    def one_step(self) -> None:
        for output in self.engine.step():
            self.tokens[output.request_id, output.choice] += output.token_ids

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.engine.has_work:
            self.one_step()
        assert self.engine.stats().blocks_used == 0
        alone = Engine(self.bench.alone_config, self.bench.alone)
        for (name, choice), output in run(alone, self.requests.values()).items():
            found = self.tokens[name, choice]
            expected = output.token_ids[: len(found)] if name in self.aborted else output.token_ids
            assert found == expected, (name, choice)


def test_ranks_give_the_tokens_of_one_process(bench: Bench) -> None:
    class Machine(RanksMachine):
        pass

    Machine.bench = bench
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=12,
            stateful_step_count=15,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
