"""Draws a snapshot as tables, with pure functions."""

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..tables import without_controls
from .snapshot import EngineRow, KvBlocks, ModelRow, Sequence, Snapshot

_BAR = 10
_STATES = {"ready": "green", "starting": "yellow", "draining": "yellow", "asleep": "blue"}
_BLOCKS = {"used": ("█", "cyan"), "cached": ("▒", "blue"), "free": ("·", "dim")}
_NOTHING = Text("-", style="dim")


def draw(snapshot: Snapshot, note: str = "") -> RenderableType:
    """The whole view; `note` is a line of its own in red."""
    at = datetime.fromtimestamp(snapshot.time, UTC).astimezone()
    title = Text(f"headrace top  {at:%H:%M:%S}  ", style="bold")
    waiting = sum(model.waiting for model in snapshot.models)
    tokens = sum(engine.output_tokens_per_s or 0.0 for engine in snapshot.engines)
    engines = len(snapshot.engines)
    title.append(
        f"{engines} engine{'s' * (engines != 1)}, {waiting} waiting, {tokens:.0f} output tokens/s",
        style="not bold",
    )
    parts: list[RenderableType] = [title]
    if snapshot.stale:
        parts.append(Text("the gateway cannot reach Redis: these are its last data", style="red"))
    if note:
        parts.append(_said(note, style="red"))
    parts += [Text(), _models(snapshot), Text(), _engines(snapshot)]
    parts += _starts(snapshot)
    if any(sequence.tenant is not None for sequence in _sequences(snapshot)):
        parts += [Text(), _tenants(snapshot)]
    if snapshot.engines_left_out:
        parts.append(Text(f"and {snapshot.engines_left_out} more engines", style="dim"))
    return Group(*parts)


def _models(snapshot: Snapshot) -> Table:
    table = _table("model", "waiting", "of", "tokens", "oldest", "running", "replicas", "why")
    for model in snapshot.models:
        table.add_row(
            _said(model.name), _load(model), Text(str(model.limit_requests)),
            Text(str(model.waiting_tokens)), Text(_seconds(model.oldest_wait)),
            Text(str(model.running)), *_scaling(model),
        )  # fmt: skip
    return table


def _load(model: ModelRow) -> Text:
    full = model.waiting >= model.limit_requests
    return Text(str(model.waiting), style="red" if full else "yellow" if model.waiting else "")


def _scaling(model: ModelRow) -> tuple[Text, Text]:
    if model.scaling is None:
        return _NOTHING, _NOTHING
    found = model.scaling
    style = "" if found.ready == found.desired else "yellow"
    return Text(f"{found.ready}/{found.desired}", style=style), _said(found.reason)


def _engines(snapshot: Snapshot) -> Table:
    """A table with a row for each engine; its model is named only if there are several."""
    several = len(snapshot.models) > 1
    table = _table(
        "engine", *["model"][:several], "state", "step", "out/s", "in/s", "prefill", "decode",
        "wait", "preempt", "KV blocks", "used",
    )  # fmt: skip
    for engine in snapshot.engines:
        states = Counter(sequence.state for sequence in engine.sequences)
        table.add_row(
            _said(engine.name or engine.id),
            *[_said(engine.model)][:several],
            _state(engine),
            _step(engine.step_seconds),
            _whole(engine.output_tokens_per_s),
            _whole(engine.prompt_tokens_per_s),
            *_batch(engine, states),
            _whole(engine.waiting),
            _whole(engine.preemptions),
            *_kv(engine.kv),
        )
    return table


def _starts(snapshot: Snapshot) -> Iterator[Text]:
    for model in snapshot.models:
        for start in model.starts:
            said = f"{start.name or start.id} starts: {start.phase}, {_seconds(start.seconds)}"
            yield _said(said, style="yellow")


def _tenants(snapshot: Snapshot) -> Table:
    """The caller's sequences in all engines, and those of others: their tenants have no names."""
    found: dict[str | None, list[Sequence]] = {}
    for sequence in _sequences(snapshot):
        found.setdefault(sequence.tenant, []).append(sequence)
    table = _table("tenant", "prefill", "decode", "wait", "preempt", "KV tokens")
    for tenant in sorted(found, key=lambda name: name is None):
        states = Counter(sequence.state for sequence in found[tenant])
        table.add_row(
            Text("others", style="dim") if tenant is None else _said(tenant),
            Text(str(states["prefill"])), Text(str(states["decode"])),
            Text(str(states["waiting"])), Text(str(states["preempted"] + states["swapped"])),
            Text(str(sum(sequence.computed for sequence in found[tenant]))),
        )  # fmt: skip
    return table


def _sequences(snapshot: Snapshot) -> Iterator[Sequence]:
    for engine in snapshot.engines:
        yield from engine.sequences


def _batch(engine: EngineRow, states: Counter[str]) -> tuple[Text, Text]:
    """The numbers of sequences in prefill and in decode; without detail, all are shown as
    decoding."""
    if not engine.detail:
        return _NOTHING, _whole(engine.running)
    return Text(str(states["prefill"])), Text(str(states["decode"]))


def _state(engine: EngineRow) -> Text:
    silent = "" if engine.state in _STATES else f" {_seconds(engine.age)}"
    return _said(engine.state + silent, style=_STATES.get(engine.state, "red"))


def _kv(kv: KvBlocks | None) -> tuple[Text, Text]:
    if kv is None or not kv.total:
        return _NOTHING, _NOTHING
    bar = Text()
    left = _BAR
    for name, (mark, style) in _BLOCKS.items():
        share = left if name == "free" else min(left, round(_BAR * getattr(kv, name) / kv.total))
        bar.append(mark * share, style=style)
        left -= share
    return bar, Text(f"{kv.used / kv.total:.0%}")


def _said(text: str, style: str = "") -> Text:
    """A text from outside, made safe for the terminal."""
    return Text(without_controls(text), style=style)


def _step(seconds: float | None) -> Text:
    return _NOTHING if seconds is None else Text(f"{1000 * seconds:.1f} ms")


def _whole(value: float | None) -> Text:
    return _NOTHING if value is None else Text(f"{value:.0f}")


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    left = {"model", "engine", "state", "why", "KV blocks"}
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table
