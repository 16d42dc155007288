"""The figures and facts by which a run is compared with other runs, from the data that the checks recorded."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from statistics import median
from typing import Any

from ddpdiag.checks.api import Seen
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.findings import Section
from ddpdiag.checks.launch import variables as lch002
from ddpdiag.checks.launch import versions as lch003
from ddpdiag.checks.training import ddp_step, mnist
from ddpdiag.checks.world import World
from ddpdiag.model import Recording
from ddpdiag.model.measurements import Steps
from ddpdiag.model.options import Figure, Sampling, Snapshot

_VERSIONS = ("python", "torch", "cuda", "hip", "nccl", "driver")
# Variables whose values differ in every run, even on the same machines.
_RUN_VARIABLES = frozenset({"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"})


def snapshot_of(world: World, recording: Recording, sections: Iterable[Section] = ()) -> Snapshot:
    """Return the figures and facts by which the run is compared with other runs, with the figures of `sections`."""
    seen = Seen(world, ddp_step.CHECK, recording)
    steps = {rank: data.steps for rank, data in seen.by_rank.items() if data.steps is not None}
    sections = tuple(sections)
    shares = [median(window.core_share for window in one.windows) for one in steps.values() if one.windows]
    return Snapshot(
        created=recording.header.created,
        shape=shape_of(world),
        facts=_facts(seen),
        figures=(
            *_median_own_work(steps),
            *_training_speed(seen),
            *(figure for section in sections for figure in section.figures),
            *_all_reduce_times(seen),
        ),
        series=tuple(series for section in sections for series in section.series),
        core_share=None if world.gpu_count else min(shares, default=None),
        on_gpus=bool(world.gpu_count),
    )


def shape_of(world: World) -> dict[str, str]:
    """Describe the number of ranks and hosts, and the backend. Only runs of the same shape are comparable.

    Ranks that never joined are part of the shape, because the run then measured a smaller world.
    """
    missing = world.size - len(world.arrivals)
    never = f" ({missing} of {world.size} never joined)" if missing > 0 else ""
    sizes = sorted(map(len, world.hosts.values()))
    uneven = f" ({sizes[0]} to {sizes[-1]} ranks each)" if sizes and sizes[0] != sizes[-1] else ""
    return {
        "ranks": f"{world.size} rank{'' if world.size == 1 else 's'}{never}",
        "hosts": f"{len(sizes)} host{'' if len(sizes) == 1 else 's'}{uneven}",
        "backend": world.backend,
    }


def _median_own_work(steps: Mapping[int, Steps]) -> Iterator[Figure]:
    """Yield, for each window of training steps, the median over ranks of the seconds of a rank's own work in a step."""
    count = min((len(one.windows) for one in steps.values()), default=0)
    if count:
        medians = [median(one.windows[index].own_seconds for one in steps.values()) for index in range(count)]
        title = "own work of the median rank in a training step"
        yield Figure(name="step.usual_seconds", title=title, values=tuple(medians), sampling=Sampling.REPEATS)


def _training_speed(seen: Seen[Any]) -> Iterator[Figure]:
    speed = mnist.figures(seen.of(mnist.CHECK)).get("training.samples_per_second")
    if isinstance(speed, int | float) and speed:
        yield Figure(
            name="training.samples_per_second",
            title="training on MNIST, samples",
            values=(float(speed),),
            sampling=Sampling.SINGLE,
            is_rate=True,
        )


def _all_reduce_times(seen: Seen[Any]) -> Iterator[Figure]:
    """Yield the times of each backend's small and large all-reduces, as the rank with the median time measured them."""
    by_backend: dict[str, list[all_reduce.Data]] = {}
    for row in seen.of(all_reduce.CHECK).rows:
        if "round" not in row.trial.params:
            by_backend.setdefault(row.data.backend, []).append(row.data)
    for backend, measured in by_backend.items():
        for size, seconds in (
            (measured[0].small_bytes, [data.small_seconds for data in measured]),
            (measured[0].large_bytes, [data.large_seconds for data in measured]),
        ):
            middle = sorted(seconds, key=lambda samples: samples.median)[len(seconds) // 2]
            yield Figure(
                name=f"all_reduce.{backend}.{size}_bytes.seconds",
                title=f"all-reduce of {size:,} bytes over {backend}",
                values=(middle.min, middle.median, middle.p95),
                sampling=Sampling.SUMMARY,
            )


def _facts(seen: Seen[Any]) -> dict[str, dict[str, str]]:
    """Return the values that occur on any rank, for each software version (LCH003) and variable (LCH002).

    Data of a check that did not run is missing. Variables that must differ between ranks or runs are left out.
    """
    versions = [
        {name: value for name in _VERSIONS if (value := getattr(data, name)) is not None}
        for data in seen.of(lch003.CHECK).by_rank.values()
    ]
    variables = [
        {name: value for name, value in data.variables.items() if name not in lch002.RANK_SPECIFIC | _RUN_VARIABLES}
        for data in seen.of(lch002.CHECK).by_rank.values()
    ]
    facts: dict[str, dict[str, str]] = {}
    for kind, by_rank in (("versions", versions), ("variables", variables)):
        values: dict[str, set[str]] = {}
        for name, value in chain.from_iterable(found.items() for found in by_rank):
            values.setdefault(name, set()).add(value)
        if by_rank:
            facts[kind] = {name: " and ".join(sorted(texts)) for name, texts in values.items()}
    return facts
