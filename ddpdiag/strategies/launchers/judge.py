"""The result of each way of starting a training, from what was seen of each turn.

Of several rounds the best counts, for each figure by itself: what else runs on the host only ever makes things slower.
"""

import statistics
from collections.abc import Iterator, Sequence
from functools import partial

from msgspec import Struct, structs

from ddpdiag.errors import ExitCode
from ddpdiag.model.train import Ended
from ddpdiag.strategies.launchers.methods import (
    Compare,
    Control,
    LauncherRow,
    LaunchersReport,
    LaunchMethod,
    Round,
    Start,
)

# Two runs of the same training differ by less than this on a quiet host; no explanation is sought for less.
_ALIKE = 0.1
# What remains of a difference without its cause, at most.
_REST = 0.2


class Seen(Struct, frozen=True, kw_only=True):
    """All turns, in their order, and the host on which they were made; `told` is the signal that ended it early."""

    starts: tuple[Start, ...]
    controls: tuple[Start, ...] = ()
    host: str
    cores: int
    seconds: float
    told: int | None = None


def judged(asked: Compare, seen: Seen, typed: dict[LaunchMethod, str]) -> LaunchersReport:
    """The table; `typed` is what a user types for each method."""
    torchrun = _best(_rounds(seen.starts, LaunchMethod.TORCHRUN))
    rows = tuple(_row(method, seen, torchrun, typed[method]) for method in typed)
    control = _control(seen.controls, torchrun)
    first = next((rank for start in seen.starts for rank in start.ranks), None)
    sentence, code = _verdict(rows, asked, seen.told)
    return LaunchersReport(
        asked=asked,
        host=seen.host,
        cores=seen.cores,
        seconds=seen.seconds,
        rows=rows,
        control=control,
        explained=(*_noise(rows), *_start_up(rows), *_steps(rows, control, asked, seen.cores)),
        sentence=sentence,
        exit_code=code,
        device=first.device if first else None,
        backend=first.backend if first else None,
        torch_version=first.torch_version if first else None,
    )


def _rounds(starts: Sequence[Start], method: LaunchMethod) -> tuple[Round, ...]:
    """The figures of each turn that worked: of its slowest rank, each."""
    return tuple(
        Round(
            start_seconds=max(rank.group_at for rank in start.ranks) - start.begun_at,
            launcher_seconds=max(rank.began_at for rank in start.ranks) - start.begun_at,
            import_seconds=max(rank.imported_at - rank.began_at for rank in start.ranks),
            step_seconds=max(statistics.median(rank.step_seconds) for rank in start.ranks),
            seconds=start.seconds,
        )
        for start in starts
        if start.method is method and start.ended is Ended.WORKS
    )


def _best(rounds: Sequence[Round]) -> Round | None:
    if not rounds:
        return None
    return Round(**{name: min(getattr(each, name) for each in rounds) for name in Round.__struct_fields__})


def _row(method: LaunchMethod, seen: Seen, torchrun: Round | None, command: str) -> LauncherRow:
    turns = [start for start in seen.starts if start.method is method]
    if not turns:
        early = (
            "the run was interrupted before its turn"
            if seen.told is not None
            else "no time was left; give more --budget"
        )
        return LauncherRow(method=method, command=command, ended=Ended.UNFINISHED, reason=early)
    bad = next((start for start in turns if start.ended is not Ended.WORKS), None)
    which = f"in round {turns.index(bad) + 1} of {len(turns)}: " if bad and len(turns) > 1 else ""
    row = LauncherRow(
        method=method,
        command=command,
        ended=bad.ended if bad else Ended.WORKS,
        reason=f"{which}{bad.reason}" if bad else "",
        rounds=_rounds(turns, method),
    )
    best = _best(row.rounds)
    if best is None:
        return row
    ranks = next(start.ranks for start in turns if start.ended is Ended.WORKS)
    return structs.replace(
        row,
        learnt_from=ranks[0].learnt_from,
        threads=tuple(rank.threads for rank in ranks),
        start_seconds=best.start_seconds,
        start_ratio=best.start_seconds / torchrun.start_seconds if torchrun else None,
        launcher_seconds=best.launcher_seconds,
        import_seconds=best.import_seconds,
        step_seconds=best.step_seconds,
        step_ratio=best.step_seconds / torchrun.step_seconds if torchrun else None,
    )


def _control(controls: Sequence[Start], torchrun: Round | None) -> Control | None:
    first = next((start for start in controls if start.ended is Ended.WORKS), None)
    best = _best(_rounds(controls, first.method)) if first else None
    if first is None or best is None or torchrun is None:
        return None
    return Control(
        method=first.method,
        omp_num_threads=first.ranks[0].threads,
        threads=tuple(rank.threads for rank in first.ranks),
        step_seconds=best.step_seconds,
        step_ratio=best.step_seconds / torchrun.step_seconds,
    )


# Why -----------------------------------------------------------------------------------------------------------------


def _of(rows: Sequence[LauncherRow], method: LaunchMethod) -> LauncherRow | None:
    """The row, if it has figures."""
    return next((row for row in rows if row.method is method and row.start_seconds is not None), None)


def _start_up(rows: Sequence[LauncherRow]) -> Iterator[str]:
    """Where the seconds before the group go."""
    torchrun, spawn, hand = map(partial(_of, rows), (LaunchMethod.TORCHRUN, LaunchMethod.SPAWN, LaunchMethod.BY_HAND))
    if torchrun is None:
        return
    parts = [
        "Start-up: torchrun, run and launch import torch themselves before they start a rank: "
        f"{torchrun.launcher_seconds:.1f} s pass until torchrun's last rank runs its first line"
    ]
    if spawn is not None:
        parts.append(f"{spawn.launcher_seconds:.1f} s with mp.spawn, whose parent imports torch too")
    if hand is not None:
        parts.append(f"{hand.launcher_seconds:.1f} s by hand, where no launcher does")
    imports = f"Then each rank imports torch, which takes {torchrun.import_seconds:.1f} s with torchrun."
    yield f"{', '.join(parts)}. {imports}"


def _apart(ratio: float | None) -> float:
    """0.25 for a ratio of 1.25 or 0.8."""
    return max(ratio, 1 / ratio) - 1 if ratio else 0.0


def _noise(rows: Sequence[LauncherRow]) -> Iterator[str]:
    same = _of(rows, LaunchMethod.RUN)
    if same is None or same.start_ratio is None or same.step_ratio is None:
        return
    if max(_apart(same.start_ratio), _apart(same.step_ratio)) > _ALIKE:
        yield (
            "Noise: torchrun and torch.distributed.run are one program, and yet the second took "
            f"{same.start_ratio:.2f} times as long to start and {same.step_ratio:.2f} times for a step. Differences of "
            "that size mean nothing here: repeat on a quiet host, or with more --rounds and --budget."
        )


def _steps(rows: Sequence[LauncherRow], control: Control | None, asked: Compare, cores: int) -> Iterator[str]:
    """Whether the number of threads explains the steps, and how that is known."""
    torchrun, free = _of(rows, LaunchMethod.TORCHRUN), _of(rows, LaunchMethod.SPAWN) or _of(rows, LaunchMethod.BY_HAND)
    if torchrun is None or free is None or free.step_ratio is None:
        return
    # How far apart two turns of one program are here: torchrun is torch.distributed.run, whatever it is called.
    same = _of(rows, LaunchMethod.RUN)
    alike = max(_ALIKE, _apart(same.step_ratio) if same else 0.0)
    how = free.method.value if free.method is LaunchMethod.BY_HAND else f"by {free.method.value}"
    if torchrun.threads == free.threads:
        if _apart(free.step_ratio) > alike:
            yield (
                f"Steps: started {how} they take {free.step_ratio:.2f} times as long as torchrun's, although each rank "
                f"has {_threads(free.threads)} in both; nothing that was measured explains it. Repeat with more "
                "--rounds."
            )
        return
    yield (
        f"Threads: torchrun, run and launch set OMP_NUM_THREADS={torchrun.threads[0]} where it is not set; mp.spawn "
        f"and by hand do not, so each of their {asked.ranks} ranks takes {_threads(free.threads)}, "
        f"{sum(free.threads)} on {_counted(cores, 'core')}. {_experiment(how, free.step_ratio, control, alike)}"
    )


def _experiment(how: str, ratio: float, control: Control | None, alike: float) -> str:
    if control is None:
        return "Whether that explains the steps was not measured: no time was left."
    found = (
        f"With OMP_NUM_THREADS={control.omp_num_threads}, steps started {how} take {control.step_ratio:.2f} times as "
        f"long as torchrun's, without it {ratio:.2f} times: "
    )
    if _apart(ratio) <= alike:
        return found + "here the threads make no difference."
    if 2 * alike > _apart(ratio):
        return found + "the noise is too large to show whether the threads are the difference."
    if _apart(control.step_ratio) <= max(alike, _REST * _apart(ratio)):
        return found + "the threads are the difference, not the launcher."
    return found + "the threads alone do not explain it."


def _threads(threads: Sequence[int]) -> str:
    least, most = min(threads), max(threads)
    return _counted(most, "thread") if least == most else f"{least} to {most} threads"


def _verdict(rows: Sequence[LauncherRow], asked: Compare, told: int | None) -> tuple[str, int]:
    """The sentence, and the exit code: 1 if one fails or hangs, else 3 if one had no turn."""
    bad = [row.method.value for row in rows if row.ended in (Ended.FAILS, Ended.HANGS)]
    silent = [row.method.value for row in rows if row.ended is Ended.UNFINISHED]
    good = len(rows) - len(bad) - len(silent)
    ranks, work = _counted(asked.ranks, "rank"), "works" if good == 1 else "work"
    parts = [f"{good or 'none'} of {len(rows)} launch methods {work} for {ranks}"]
    if bad and len(bad) < len(rows):
        parts.append(f"{', '.join(bad)} {'does' if len(bad) == 1 else 'do'} not")
    if silent:
        parts.append(f"not finished: {', '.join(silent)}")
    code = ExitCode.UNFIT if bad else ExitCode.UNKNOWN if silent else ExitCode.FIT
    return "; ".join(parts), int(code) if told is None else 128 + told


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
