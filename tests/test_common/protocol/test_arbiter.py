"""The gateway's rules for one request: whatever engines send, the client sees one history.

The property tests simulate engines after failures: one that is cut off and continues to send, one
that takes over, one that starts again from nothing under an old or the same attempt. Replies are
duplicated, lost, and reordered between engines. Tokens carry a checksum of their history.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_common.errors import FailureCode
from headrace_common.protocol.arbiter import Action, Arbiter, Deliver, Fail, Ignore, Lost, Send
from headrace_common.protocol.base import Outcome
from headrace_common.wire.messages import (
    ChoiceState,
    Disown,
    Failed,
    Logprobs,
    Reply,
    Resend,
    Resume,
    Sync,
    Takeover,
    Tokens,
)
from headrace_testing.fake_engine import is_one_history, next_token


def tokens(
    index: int,
    *ids: int,
    attempt: int = 1,
    choice: int = 0,
    end: str | None = None,
    number: int = 0,
) -> Tokens:
    return Tokens(
        request_id="r",
        attempt=attempt,
        choice=choice,
        index=index,
        token_ids=ids,
        finish_reason=end,
        round=number,
    )


def takeover(attempt: int, number: int = 1) -> Takeover:
    return Takeover(request_id="r", attempt=attempt, round=number, rounds_in_tokens=True)


def delivered(actions: object) -> list[tuple[int, ...]]:
    assert isinstance(actions, list | tuple)
    return [action.token_ids for action in actions if isinstance(action, Deliver)]


def sent(actions: object) -> list[object]:
    assert isinstance(actions, list | tuple)
    return [action.control for action in actions if isinstance(action, Send)]


def test_tokens_are_delivered_once_and_in_order() -> None:
    arbiter = Arbiter("r", 1)
    assert delivered(arbiter.handle("e", tokens(0, 1, 2))) == [(1, 2)]
    assert arbiter.handle("e", tokens(0, 1, 2)) == [Ignore("duplicate")]
    assert delivered(arbiter.handle("e", tokens(1, 2, 3))) == [(3,)]
    assert delivered(arbiter.handle("e", tokens(3, 4, end="stop"))) == [(4,)]
    assert arbiter.complete
    assert arbiter.states() == (ChoiceState(token_ids=(1, 2, 3, 4), finish_reason="stop"),)


def test_all_but_the_first_and_last_tokens_are_handled_in_one_check() -> None:
    arbiter = Arbiter("r", 1)
    assert arbiter.follow("e", tokens(0, 1)) is None
    arbiter.handle("e", tokens(0, 1))
    assert arbiter.follow("e", tokens(1, 2, 3)) == Deliver(choice=0, token_ids=(2, 3))
    for other in (tokens(1, 2), tokens(4, 5), tokens(3, 4, attempt=2), tokens(3, 4, end="stop")):
        assert arbiter.follow("e", other) is None
    assert arbiter.follow("another", tokens(3, 4)) is None
    assert arbiter.states() == (ChoiceState(token_ids=(1, 2, 3)),)


def test_log_probabilities_are_cut_like_their_tokens() -> None:
    arbiter = Arbiter("r", 1)
    items = tuple(Logprobs(-float(number), 1, ()) for number in range(3))
    arbiter.handle("e", tokens(0, 7))
    reply = Tokens(
        request_id="r", attempt=1, choice=0, index=0, token_ids=(7, 8, 9), logprobs=items
    )
    (action,) = arbiter.handle("e", reply)
    assert isinstance(action, Deliver)
    assert (action.token_ids, action.logprobs) == ((8, 9), items[1:])


def test_log_probabilities_are_part_of_the_history() -> None:
    arbiter = Arbiter("r", 1)
    items = tuple(Logprobs(-float(number), 1, ()) for number in range(3))
    first = Tokens(request_id="r", attempt=1, choice=0, index=0, token_ids=(7,), logprobs=items[:1])
    arbiter.handle("e", first)
    state = ChoiceState(token_ids=(7, 8, 9), logprobs=items)
    sync = Sync(request_id="r", attempt=1, choices=(state,), cached_tokens=4)
    (action,) = arbiter.handle("e", sync)
    assert isinstance(action, Deliver)
    assert (action.logprobs, action.cached_tokens) == (items[1:], 4)
    assert arbiter.states() == (state,)
    (resume,) = sent(arbiter.handle("e2", takeover(2)))
    assert isinstance(resume, Resume) and resume.choices == (state,)


def test_an_arbiter_adopts_the_tokens_of_a_dead_gateway() -> None:
    arbiter = Arbiter("r", 1)
    arbiter.handle("e", tokens(0, 7))
    assert delivered(arbiter.adopt([ChoiceState(token_ids=(7, 8, 9))])) == [(8, 9)]
    for other in ((7, 8), (1, 2, 3, 4)):
        assert arbiter.adopt([ChoiceState(token_ids=other)]) == []
    (resume,) = sent(arbiter.handle("e2", takeover(2)))
    assert isinstance(resume, Resume) and resume.choices[0].token_ids == (7, 8, 9)


def test_incomplete_log_probabilities_are_not_passed_on() -> None:
    arbiter = Arbiter("r", 1)
    arbiter.handle("e", tokens(0, 7))
    more = Tokens(
        request_id="r",
        attempt=1,
        choice=0,
        index=1,
        token_ids=(8,),
        logprobs=(Logprobs(-1.0, 1, ()),),
    )
    (action,) = arbiter.handle("e", more)
    assert isinstance(action, Deliver) and action.logprobs is not None
    assert arbiter.states() == (ChoiceState(token_ids=(7, 8)),)


def test_a_gap_is_asked_for_once() -> None:
    arbiter = Arbiter("r", 1)
    arbiter.handle("e", tokens(0, 1))
    assert sent(arbiter.handle("e", tokens(2, 3))) == [Resend(request_id="r", choice=0, index=1)]
    assert sent(arbiter.handle("e", tokens(3, 4))) == []
    assert delivered(arbiter.handle("e", tokens(1, 2, 3, 4))) == [(2, 3, 4)]
    assert sent(arbiter.handle("e", tokens(9, 9))) == [Resend(request_id="r", choice=0, index=4)]


def test_an_engine_that_takes_over_gets_the_tokens_that_the_client_has() -> None:
    arbiter = Arbiter("r", 2)
    arbiter.handle("e1", tokens(0, 1, 2))
    arbiter.handle("e1", tokens(0, 5, choice=1, end="length"))
    (resume,) = sent(arbiter.handle("e2", takeover(2, 3)))
    states = (
        ChoiceState(token_ids=(1, 2)),
        ChoiceState(token_ids=(5,), finish_reason="length"),
    )
    assert resume == Resume(request_id="r", attempt=2, choices=states, round=3)
    assert delivered(arbiter.handle("e1", tokens(2, 666))) == []
    more = tokens(2, 3, attempt=2, number=3)
    assert delivered(arbiter.handle("e2", more)) == [(3,)]


def test_a_replaced_engine_is_notified() -> None:
    arbiter = Arbiter("r", 1)
    arbiter.handle("e1", tokens(0, 1))
    arbiter.handle("e2", takeover(2))
    disown = Disown(request_id="r", attempt=1, superseded=True)
    assert sent(arbiter.handle("e1", tokens(1, 9))) == [disown]
    assert sent(arbiter.handle("e1", tokens(2, 9))) == []
    assert sent(arbiter.handle("e1", takeover(1))) == [disown]


def test_an_engine_that_starts_over_after_a_rollback_must_ask_first() -> None:
    arbiter = Arbiter("r", 1)
    arbiter.handle("e1", tokens(0, 1, 2))
    (nudge,) = sent(arbiter.handle("e2", tokens(0, 7)))
    assert isinstance(nudge, Resume) and nudge.round == 0
    assert delivered(arbiter.handle("e2", tokens(2, 9))) == []
    assert len(sent(arbiter.handle("e2", takeover(1)))) == 1
    assert delivered(arbiter.handle("e2", tokens(2, 3, number=1))) == [(3,)]


def test_replies_of_a_replaced_engine_are_ignored() -> None:
    """Its replies under the same attempt are ignored too, even if its question is read again."""
    arbiter = Arbiter("r", 1)
    arbiter.handle("e1", takeover(1))
    arbiter.handle("e1", tokens(0, 1, 2, number=1))
    arbiter.handle("e2", takeover(1))
    disown = Disown(request_id="r", attempt=1, superseded=True)
    assert sent(arbiter.handle("e1", takeover(1))) == [disown]
    assert delivered(arbiter.handle("e1", tokens(2, 9))) == []
    assert arbiter.owner == ("e2", 1)
    assert delivered(arbiter.handle("e2", tokens(2, 3, number=1))) == [(3,)]


def test_an_owner_that_contradicts_itself_must_ask_first() -> None:
    arbiter = Arbiter("r", 1)
    arbiter.handle("e", tokens(0, 1, 2))
    (nudge,) = sent(arbiter.handle("e", tokens(0, 7)))
    assert isinstance(nudge, Resume) and nudge.round == 0
    assert delivered(arbiter.handle("e", tokens(2, 9))) == []
    arbiter.handle("e", takeover(1, 2))
    assert delivered(arbiter.handle("e", tokens(2, 3, number=2))) == [(3,)]


@pytest.mark.parametrize("rounds", [True, False])
def test_tokens_that_a_sender_wrote_before_its_takeover_are_not_delivered(rounds: bool) -> None:
    """They are found by a gateway that reads its stream again; only engines of 0.1.0 send no
    round."""
    arbiter = Arbiter("r", 1)
    arbiter.handle("e1", tokens(0, 1, 2))
    early = tokens(2, 9)
    arbiter.handle("e2", early)
    asks = Takeover(request_id="r", attempt=1, round=5, rounds_in_tokens=rounds)
    arbiter.handle("e2", asks)
    again = arbiter.handle("e2", early)
    assert delivered(again) == ([] if rounds else [(9,)])
    if rounds:
        assert Ignore("earlier_round") in again
        assert arbiter.follow("e2", early) is None
        assert arbiter.follow("e2", tokens(2, 3, number=5)) == Deliver(choice=0, token_ids=(3,))


def test_a_sync_must_extend_the_tokens_that_the_client_has() -> None:
    arbiter = Arbiter("r", 1)
    arbiter.handle("e1", tokens(0, 1, 2))
    longer = Sync(request_id="r", attempt=1, choices=(ChoiceState(token_ids=(1, 2, 3)),))
    assert delivered(arbiter.handle("e1", longer)) == [(3,)]
    other = Sync(request_id="r", attempt=2, choices=(ChoiceState(token_ids=(9, 9, 9, 9)),))
    (nudge,) = sent(arbiter.handle("e2", other))
    assert isinstance(nudge, Resume) and nudge.round == 0
    assert arbiter.owner == ("e1", 1)


def test_a_stopped_choice_gets_no_more() -> None:
    arbiter = Arbiter("r", 2)
    arbiter.handle("e", tokens(0, 1))
    assert arbiter.stop_choice(0) and not arbiter.stop_choice(0)
    assert arbiter.handle("e", tokens(1, 2)) == [Ignore("choice_ended")]
    assert not arbiter.complete
    arbiter.handle("e", tokens(0, 3, choice=1, end="stop"))
    assert arbiter.complete


def test_a_failure_of_an_older_attempt_is_ignored() -> None:
    arbiter = Arbiter("r", 1)
    arbiter.handle("e2", takeover(2))
    failed = Failed(request_id="r", attempt=1, failure=FailureCode.INTERNAL, message="")
    assert arbiter.handle("e1", failed) == [Ignore("older_attempt")]
    newer = Failed(request_id="r", attempt=3, failure=FailureCode.POISONED, message="")
    assert arbiter.handle("e3", newer) == [Fail(newer)]
    assert arbiter.ended


def test_an_engine_that_lost_its_state_ends_nothing() -> None:
    arbiter = Arbiter("r", 1)
    arbiter.handle("e2", tokens(0, 1, attempt=2))
    old = Failed(request_id="r", attempt=1, failure=FailureCode.LOST, message="")
    assert arbiter.handle("e1", old) == [Ignore("older_attempt")]
    lost = Failed(request_id="r", attempt=3, failure=FailureCode.LOST, message="")
    assert arbiter.handle("e3", lost) == [Lost()]
    assert not arbiter.ended
    (resume,) = sent(arbiter.handle("e4", takeover(4)))
    assert isinstance(resume, Resume) and resume.choices[0].token_ids == (1,)
    assert arbiter.settle(Outcome(failed=lost)) == [Fail(lost)]  # as reported by the queue


def test_an_outcome_that_does_not_end_all_choices_changes_nothing() -> None:
    arbiter = Arbiter("r", 2)
    arbiter.handle("e", tokens(0, 1))
    begun = ChoiceState(token_ids=(1, 2))
    ended = ChoiceState(token_ids=(3,), finish_reason="stop")
    assert arbiter.settle(Outcome(choices=(begun, ended))) is None
    assert arbiter.states() == (ChoiceState(token_ids=(1,)), ChoiceState())


@pytest.mark.parametrize(
    ("stored", "rest"),
    [((1, 2, 3), [(3,)]), ((1, 2), [()]), ((1, 9, 3), None), ((1,), None)],
)
def test_a_stored_outcome_with_the_same_tokens_ends_the_request(
    stored: tuple[int, ...], rest: list[tuple[int, ...]] | None
) -> None:
    arbiter = Arbiter("r", 1)
    arbiter.handle("e", tokens(0, 1, 2))
    outcome = Outcome(choices=(ChoiceState(token_ids=stored, finish_reason="stop"),))
    actions = arbiter.settle(outcome)
    assert (None if actions is None else delivered(actions)) == rest


class PlayedEngine:
    """One engine's run of the request: follows the protocol, on random tokens."""

    def __init__(self, name: str, attempt: int, choices: int, rng: random.Random) -> None:
        self.name = name
        self.attempt = attempt
        self.rng = rng
        self.round = 0  # of the last question
        self.run_round = 0
        self.history: list[list[int]] = [[] for _ in range(choices)]
        self.frames: list[Reply] = []
        self.alive = True
        self.asking = False

    def ask(self) -> None:
        self.round += 1
        self.asking = True
        self.frames.append(takeover(self.attempt, self.round))

    def step(self, most: int) -> None:
        if self.asking or not self.alive:
            return
        for choice, history in enumerate(self.history):
            if len(history) < most:
                history.append(next_token(choice, history, self.rng))
                self.frames.append(self.reply(choice, len(history) - 1, most))

    def reply(self, choice: int, index: int, most: int) -> Tokens:
        history = self.history[choice]
        end = "length" if len(history) == most else None
        ids = history[index:]
        return tokens(
            index, *ids, attempt=self.attempt, choice=choice, end=end, number=self.run_round
        )

    def start_over(self) -> None:
        """Redis forgot that the engine had the request, and gives it to the engine once more."""
        self.history = [[] for _ in self.history]
        self.ask()

    def hear(self, control: object, most: int) -> None:
        if isinstance(control, Disown):
            self.alive = False
        elif isinstance(control, Resend) and not self.asking:
            self.frames.append(self.reply(control.choice, control.index, most))
        elif isinstance(control, Resume) and control.round == 0 and not self.asking:
            self.ask()
        elif isinstance(control, Resume) and control.round == self.round and self.asking:
            self.asking = False
            self.run_round = self.round
            self.history = [list(state.token_ids) for state in control.choices]


class Play:
    """Engines, the frames in transit and the client."""

    def __init__(self, choices: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.most = 12
        self.arbiter = Arbiter("r", choices)
        self.twin = Arbiter("r", choices)  # one that is first asked by `follow`
        self.engines: list[PlayedEngine] = []
        self.past: list[tuple[PlayedEngine, Reply]] = []
        self.got: list[list[int]] = [[] for _ in range(choices)]

    def start(self, *, attempt: int, ask: bool) -> None:
        name = f"e{len(self.engines)}"
        engine = PlayedEngine(name, attempt, len(self.got), self.rng)
        if ask:
            engine.ask()
        self.engines.append(engine)

    def deliver(self, engine: PlayedEngine, reply: Reply) -> None:
        self.past.append((engine, reply))
        self.handle(engine, reply)

    def handle(self, engine: PlayedEngine, reply: Reply) -> None:
        followed = self.twin.follow(engine.name, reply) if isinstance(reply, Tokens) else None
        actions = self.arbiter.handle(engine.name, reply)
        assert actions == ([followed] if followed else self.twin.handle(engine.name, reply))
        assert self.arbiter.states() == self.twin.states()
        for action in actions:
            self.carry_out(action)
        for choice, got in enumerate(self.got):
            assert is_one_history(choice, got)
            assert self.arbiter.states()[choice].token_ids == tuple(got)

    def carry_out(self, action: Action) -> None:
        if isinstance(action, Deliver):
            self.got[action.choice] += action.token_ids
        elif isinstance(action, Send) and self.rng.random() > 0.1:
            engine = next(e for e in self.engines if e.name == action.engine_id)
            engine.hear(action.control, self.most)

    def forget(self, engine: PlayedEngine) -> None:
        """Lets an engine start over, or report that it does not know the client's tokens."""
        if self.rng.random() < 0.3:
            engine.start_over()
            return
        failed = Failed(
            request_id="r", attempt=engine.attempt, failure=FailureCode.LOST, message=""
        )
        self.deliver(engine, failed)

    def act(self) -> None:
        """Lets one random event happen."""
        engine = self.rng.choice(self.engines)
        match self.rng.randrange(13):
            case 0:
                self.start(attempt=self.rng.randint(1, 4), ask=False)
            case 1:
                self.start(attempt=self.arbiter.attempt + 1, ask=True)
            case 2 if (
                self.past and self.rng.random() < 0.3
            ):  # a reconnected gateway reads everything again
                for old, reply in self.past:
                    self.handle(old, reply)
            case 3 if engine.frames:
                engine.frames.pop(0)  # lost
            case 4 if engine.frames:
                self.deliver(engine, engine.frames[0])  # will be delivered again
            case 5 if engine.asking:
                engine.ask()
            case 12:
                self.forget(engine)
            case _ if engine.frames and self.rng.random() < 0.7:
                self.deliver(engine, engine.frames.pop(0))
            case _:
                engine.step(self.most)


@given(seed=st.integers(0, 2**32), choices=st.integers(1, 3), steps=st.integers(20, 120))
def test_whatever_engines_send_the_client_sees_one_history(
    seed: int, choices: int, steps: int
) -> None:
    play = Play(choices, seed)
    play.start(attempt=1, ask=False)
    for _ in range(steps):
        play.act()
    play.start(attempt=play.arbiter.attempt + 5, ask=True)
    last = play.engines[-1]
    for _ in range(200):  # from here on nothing else fails
        if play.arbiter.complete:
            break
        last.step(play.most)
        if last.frames:
            play.deliver(last, last.frames.pop(0))
        elif last.asking:
            last.ask()
    assert play.arbiter.complete
    assert all(len(got) == play.most for got in play.got)
