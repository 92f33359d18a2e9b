"""`headrace simulate`: reads the options, compares policies, prints and writes the results."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import track

from headrace_common.protocol.base import QueueLimits
from headrace_common.protocol.turns import TurnBounds

from ..scaling import Forecast, Objective, PolicyError, ScalingPolicy
from .comparison import POLICIES, YIELD, Comparison, with_room_to_scale
from .engine_profile import EngineProfile, load_profile
from .errors import SimulationError
from .oracle import GOAL
from .report import sharing_table, table, write_json, write_plot
from .result import Objectives
from .sharing_comparison import SharingComparison
from .workload import DAY, BatchLoad, Diurnal, Trace, diurnal, read_csv, with_batches

app = typer.Typer(rich_markup_mode="markdown", add_completion=False, pretty_exceptions_enable=False)
_LIMITS = QueueLimits()
_POLICY = ScalingPolicy()
_LOAD = Diurnal()
_GOALS = Objectives()
_BATCHES = BatchLoad(share=0.0)
_TURNS = TurnBounds()
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Outputs:
    json: Path | None
    plot: Path | None

    def check(self) -> None:
        """Raises SimulationError if a file could not be written after the runs."""
        for path in (self.json, self.plot):
            if path is not None and not path.absolute().parent.is_dir():
                raise SimulationError(f"{path}: its folder does not exist; make it")


@app.command()
def simulate(
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            help="CSV with arrival_seconds, prompt_tokens, output_tokens; default: a made-up day. "
            "Repeat it for several models, which share one accelerator."
        ),
    ] = None,
    models: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of made-up traces, one for each model, at different times of the day.",
        ),
    ] = 1,
    min_awake: Annotated[
        float, typer.Option(min=0, help="Fewest seconds that a model with work stays awake.")
    ] = _TURNS.min_awake,
    max_awake: Annotated[
        float, typer.Option(min=1, help="Seconds after which a model lets another one wake up.")
    ] = _TURNS.max_awake,
    engine_profile: Annotated[
        Path | None,
        typer.Option(help="JSON of benchmarks/calibrate.py; default: an example, not measured."),
    ] = None,
    cold_start: Annotated[
        float | None,
        typer.Option(min=0.1, help="Seconds until a new engine serves; default: the profile's."),
    ] = None,
    days: Annotated[float, typer.Option(min=0.01, help="Length of the made-up trace.")] = 1.0,
    peak_rate: Annotated[
        float,
        typer.Option(min=0.001, help="Requests a second of the made-up trace at its busiest time."),
    ] = _LOAD.peak_rate,
    open_hours: Annotated[
        float,
        typer.Option(
            min=0.1, max=24, help="Hours of a day in which the made-up trace has requests."
        ),
    ] = _LOAD.open_hours,
    bursts: Annotated[
        int, typer.Option(min=0, help="Bursts a day of the made-up trace.")
    ] = _LOAD.bursts,
    burst: Annotated[
        float, typer.Option(min=0, help="The largest burst, as a share of the peak rate.")
    ] = _LOAD.burst,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the made-up trace.")] = 0,
    batch_share: Annotated[
        float,
        typer.Option(
            min=0,
            max=0.9,
            help=f"Share of all requests that are lines of batches; adds the policy {YIELD}.",
        ),
    ] = _BATCHES.share,
    batches: Annotated[int, typer.Option(min=1, help="Number of these batches.")] = _BATCHES.count,
    batch_window: Annotated[
        float, typer.Option(min=0.1, help="Hours within which each batch must end.")
    ] = 24.0,
    ttft: Annotated[
        float, typer.Option(min=0, help="Objective: seconds to the first token.")
    ] = _GOALS.time_to_first_token,
    tpot: Annotated[
        float, typer.Option(min=0, help="Objective: seconds per output token after it.")
    ] = _GOALS.time_per_output_token,
    min_replicas: Annotated[int, typer.Option(min=0, help="Fewest engines; 0 scales to zero.")] = 1,
    max_replicas: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Most engines; default: twice the fixed peak fleet."),
    ] = None,
    utilization: Annotated[
        float, typer.Option(help="Target of all policies: share of sequences that run.")
    ] = _POLICY.utilization,
    percentile: Annotated[
        float | None,
        typer.Option(
            min=50,
            max=99.9,
            help="Headrace's engines follow the objectives at this percentile, not --utilization.",
        ),
    ] = None,
    drain_time: Annotated[
        float, typer.Option(help="Seconds in which waiting work is to be done.")
    ] = _POLICY.drain_time,
    forecast: Annotated[
        bool, typer.Option(help="Scale ahead of load that earlier days had (--days above 1).")
    ] = False,
    max_queued_requests: Annotated[
        int, typer.Option(min=1, help="The gateways' bound of waiting requests.")
    ] = _LIMITS.max_requests,
    max_queued_tokens: Annotated[
        int, typer.Option(min=1, help="The gateways' bound of waiting tokens.")
    ] = _LIMITS.max_tokens,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Policy to compare, repeatable: {', '.join((*POLICIES, YIELD))}; default: all."
        ),
    ] = None,
    oracle: Annotated[
        bool,
        typer.Option("--oracle", help="Also find the cheapest fleet for the trace, known ahead."),
    ] = False,
    json: Annotated[Path | None, typer.Option(help="File for the results.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG file for a picture.")] = None,
) -> None:
    """Compare scaling policies on a trace in virtual time; the operator's own code decides."""
    load = Diurnal(
        seconds=days * DAY,
        peak_rate=peak_rate,
        open_hours=open_hours,
        bursts=round(bursts * max(1.0, days)),
        burst=burst,
        seed=seed,
    )
    wanted = ScalingPolicy(
        min_replicas=min_replicas,
        max_replicas=max(1, min_replicas) if max_replicas is None else max_replicas,
        utilization=utilization,
        objective=None
        if percentile is None
        else Objective(
            time_to_first_token=ttft, time_per_output_token=tpot, percentile=percentile / 100
        ),
        drain_time=drain_time,
        forecast=Forecast() if forecast else None,
    )
    names = _names(policy, (*POLICIES, YIELD) if batch_share else POLICIES)
    outputs = _Outputs(json, plot)
    outputs.check()
    if max(models, len(trace or ())) > 1:
        if min_awake > max_awake:
            raise SimulationError(f"--min-awake {min_awake:g}: it must not be above --max-awake")
        if policy or oracle or plot:
            raise SimulationError("--policy, --oracle and --plot are for one model; leave them out")
        if batch_share:
            raise SimulationError("--batch-share is for one model; leave it out")
    if batch_share and oracle:
        raise SimulationError("--oracle knows no batches; leave out --batch-share")
    traces = _traces(trace or (), load, models)
    profile = load_profile(engine_profile)
    if cold_start is not None:
        profile = replace(profile, cold_start_seconds=cold_start)
    objectives = Objectives(time_to_first_token=ttft, time_per_output_token=tpot)
    limits = QueueLimits(max_requests=max_queued_requests, max_tokens=max_queued_tokens)
    inputs = {
        "trace": [str(path) for path in trace] if trace else asdict(load),
        "profile": asdict(profile),
        "objectives": asdict(objectives),
        "limits": asdict(limits),
    }
    if len(traces) > 1:
        sharing = SharingComparison(
            traces=traces,
            profile=profile,
            policy=wanted,
            bounded=max_replicas is not None,
            objectives=objectives,
            limits=limits,
            bounds=TurnBounds(min_awake, max_awake),
        )
        _compare_sharing(sharing, inputs, outputs)
        return
    (arrivals,) = traces
    if batch_share:
        batch_load = BatchLoad(share=batch_share, count=batches, seed=seed)
        arrivals = with_batches(arrivals, batch_load)
        inputs["batches"] = {**asdict(batch_load), "window_hours": batch_window}
    comparison = Comparison(
        trace=arrivals,
        profile=profile,
        policy=wanted if max_replicas else with_room_to_scale(arrivals, profile, wanted),
        objectives=objectives,
        limits=limits,
        batch_window=batch_window * 3600,
    )
    _compare(comparison, names, inputs, outputs, with_oracle=oracle)


def _traces(paths: Sequence[Path], load: Diurnal, models: int) -> tuple[Trace, ...]:
    """The traces of the files, or made-up ones whose days are spread evenly over a day."""
    if paths and models > 1:
        raise SimulationError("--models is for made-up traces; repeat --trace instead")
    made = (
        replace(load, seed=load.seed + number, shift=number / models) for number in range(models)
    )
    traces = tuple(map(read_csv, paths)) if paths else tuple(map(diurnal, made))
    if not all(map(len, traces)):
        raise SimulationError("a made-up trace has no requests; raise --peak-rate or --days")
    return traces


def _names(chosen: list[str] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [name for name in chosen or () if name not in known]
    if unknown:
        hint = "; it needs --batch-share" if unknown[0] == YIELD else ""
        raise SimulationError(f"--policy {unknown[0]}: unknown{hint}; choose of {', '.join(known)}")
    return tuple(dict.fromkeys(chosen)) if chosen else known


def _compare(
    comparison: Comparison,
    names: tuple[str, ...],
    inputs: dict[str, Any],
    outputs: _Outputs,
    *,
    with_oracle: bool,
) -> None:
    console = Console()
    title = _title((comparison.trace,), comparison.profile, comparison.objectives)
    console.print(title, highlight=False)
    results = list(_tracked(comparison.run(names), len(names)))
    bound = None
    if with_oracle:
        results.append(comparison.oracle())
        bound = comparison.lower_bound()
    console.print(table(results))
    if bound is not None:
        console.print(
            f"No fleet that meets the objectives for {GOAL:.0%} costs less than {bound:.1f} "
            "GPU-hours.",
            highlight=False,
        )
        inputs["lower_bound_gpu_hours"] = bound
    inputs |= {"requests": len(comparison.trace), "policy": asdict(comparison.policy)}
    if outputs.json is not None:
        write_json(outputs.json, inputs, results)
        _tell("results", outputs.json)
    if outputs.plot is not None:
        write_plot(outputs.plot, title, results)
        _tell("picture", outputs.plot)


def _compare_sharing(
    comparison: SharingComparison, inputs: dict[str, Any], outputs: _Outputs
) -> None:
    console = Console()
    title = _title(comparison.traces, comparison.profile, comparison.objectives)
    console.print(title, highlight=False)
    results = list(_tracked(comparison.run(), comparison.RUNS))
    console.print(sharing_table(results))
    inputs |= {
        "requests": [len(trace) for trace in comparison.traces],
        "policy": asdict(comparison.policy),
        "turns": asdict(comparison.bounds),
    }
    if outputs.json is not None:
        write_json(outputs.json, inputs, results)
        _tell("results", outputs.json)


def _title(traces: Sequence[Trace], profile: EngineProfile, objectives: Objectives) -> str:
    requests = sum(map(len, traces))
    hours = max(trace.seconds for trace in traces) / 3600
    models = f" of {len(traces)} models" if len(traces) > 1 else ""
    return (
        f"{requests:,} requests{models} in {hours:.1f} hours, engine {profile.name}, "
        f"TTFT {objectives.time_to_first_token:g} s, "
        f"TPOT {objectives.time_per_output_token * 1000:g} ms"
    )


def _tracked(runs: Iterable[T], count: int) -> Iterable[T]:
    return track(runs, "simulating", count, console=Console(stderr=True), transient=True)


def _tell(what: str, path: Path) -> None:
    Console(stderr=True).print(f"{what}: {path.absolute()}", markup=False, soft_wrap=True)


def main() -> None:
    """Entry point. An error that the user can fix is one line, with exit code 2."""
    try:
        app(prog_name="headrace simulate")
    except (SimulationError, PolicyError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
