"""What the ways of starting a training came to, from what was seen of each turn.

Of several rounds the best counts, for each figure by itself: what else runs on the host only ever makes things slower.
"""

import statistics
from collections.abc import Iterator, Sequence

from msgspec import Struct

from ddpdiag.errors import ExitCode
from ddpdiag.model.launching import Compare, Control, LauncherRow, LaunchersReport, Round, Start, Way
from ddpdiag.model.train import Ended

# Two runs of the same training differ by less than this on a quiet host; no explanation is sought for less.
ALIKE = 0.1
# What remains of a difference without its cause, at most.
_REST = 0.2


class Seen(Struct, frozen=True, kw_only=True):
    """All turns, in their order, and the host on which they were made."""

    starts: tuple[Start, ...]
    controls: tuple[Start, ...] = ()
    host: str
    cores: int
    seconds: float
    told: int | None = None


def judged(asked: Compare, seen: Seen, typed: dict[Way, str]) -> LaunchersReport:
    """The table; `typed` is what a user types for each way. `seen.told` is the signal that ended it early."""
    torchrun = _best(_rounds(seen.starts, Way.TORCHRUN))
    rows = tuple(_row(way, seen, torchrun, typed[way]) for way in typed)
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


def round_of(start: Start) -> Round:
    """The figures of a turn that worked: of its slowest rank, each."""
    return Round(
        start_seconds=max(rank.group_at for rank in start.ranks) - start.begun_at,
        launcher_seconds=max(rank.began_at for rank in start.ranks) - start.begun_at,
        import_seconds=max(rank.imported_at - rank.began_at for rank in start.ranks),
        step_seconds=max(statistics.median(rank.step_seconds) for rank in start.ranks),
        seconds=start.seconds,
    )


def _rounds(starts: Sequence[Start], way: Way) -> tuple[Round, ...]:
    return tuple(round_of(start) for start in starts if start.way is way and start.ended is Ended.WORKS)


def _best(rounds: Sequence[Round]) -> Round | None:
    if not rounds:
        return None
    return Round(
        start_seconds=min(each.start_seconds for each in rounds),
        launcher_seconds=min(each.launcher_seconds for each in rounds),
        import_seconds=min(each.import_seconds for each in rounds),
        step_seconds=min(each.step_seconds for each in rounds),
        seconds=min(each.seconds for each in rounds),
    )


def _row(way: Way, seen: Seen, torchrun: Round | None, command: str) -> LauncherRow:
    turns = [start for start in seen.starts if start.way is way]
    if not turns:
        reason = (
            "the run was ended before its turn" if seen.told is not None else "no time was left; give more --budget"
        )
        return LauncherRow(way=way, command=command, ended=Ended.UNFINISHED, reason=reason)
    rounds = _rounds(turns, way)
    best = _best(rounds)
    bad = next((start for start in turns if start.ended is not Ended.WORKS), None)
    ranks = next((start.ranks for start in turns if start.ended is Ended.WORKS), ())
    return LauncherRow(
        way=way,
        command=command,
        ended=bad.ended if bad else Ended.WORKS,
        reason=_told(bad, turns) if bad else "",
        learnt_from=ranks[0].learnt_from if ranks else None,
        threads=tuple(rank.threads for rank in ranks),
        start_seconds=best.start_seconds if best else None,
        start_ratio=best.start_seconds / torchrun.start_seconds if best and torchrun else None,
        launcher_seconds=best.launcher_seconds if best else None,
        import_seconds=best.import_seconds if best else None,
        step_seconds=best.step_seconds if best else None,
        step_ratio=best.step_seconds / torchrun.step_seconds if best and torchrun else None,
        rounds=rounds,
    )


def _told(bad: Start, turns: Sequence[Start]) -> str:
    """Its error, and which of its turns that was, if others worked."""
    return bad.reason if len(turns) == 1 else f"in round {turns.index(bad) + 1} of {len(turns)}: {bad.reason}"


def _control(controls: Sequence[Start], torchrun: Round | None) -> Control | None:
    way = controls[0].way if controls else Way.SPAWN
    best = _best(_rounds(controls, way))
    if best is None or torchrun is None:
        return None
    threads = next(tuple(rank.threads for rank in start.ranks) for start in controls if start.ended is Ended.WORKS)
    ratio = best.step_seconds / torchrun.step_seconds
    return Control(
        way=way, omp_num_threads=threads[0], threads=threads, step_seconds=best.step_seconds, step_ratio=ratio
    )


# Why -----------------------------------------------------------------------------------------------------------------


def _of(rows: Sequence[LauncherRow], way: Way) -> LauncherRow | None:
    """The row, if it has figures."""
    return next((row for row in rows if row.way is way and row.start_seconds is not None), None)


def _start_up(rows: Sequence[LauncherRow]) -> Iterator[str]:
    """Where the seconds before the group go."""
    torchrun, hand, spawn = (_of(rows, way) for way in (Way.TORCHRUN, Way.BY_HAND, Way.SPAWN))
    if torchrun is None:
        return
    told = [
        "Start-up: torchrun, run and launch import torch themselves before they start a rank: "
        f"{torchrun.launcher_seconds:.1f} s pass until torchrun's last rank runs its first line"
    ]
    if spawn is not None:
        told.append(f"{spawn.launcher_seconds:.1f} s with mp.spawn, whose parent imports torch too")
    if hand is not None:
        told.append(f"{hand.launcher_seconds:.1f} s by hand, where nobody does")
    yield f"{', '.join(told)}. Then each rank imports torch, which takes {torchrun.import_seconds:.1f} s with torchrun."


def noise(rows: Sequence[LauncherRow]) -> float:
    """How far apart two turns of one program are here: torchrun is torch.distributed.run, whatever it is called."""
    same = _of(rows, Way.RUN)
    return max(ALIKE, _apart(same.step_ratio) if same else 0.0)


def _apart(ratio: float | None) -> float:
    """0.25 for a ratio of 1.25 or 0.8."""
    return max(ratio, 1 / ratio) - 1 if ratio else 0.0


def _noise(rows: Sequence[LauncherRow]) -> Iterator[str]:
    same = _of(rows, Way.RUN)
    if same is None or same.start_ratio is None or same.step_ratio is None:
        return
    if max(_apart(same.start_ratio), _apart(same.step_ratio)) > ALIKE:
        yield (
            "Noise: torchrun and torch.distributed.run are one program, and yet the second took "
            f"{same.start_ratio:.2f} times as long to start and {same.step_ratio:.2f} times for a step. Differences of "
            "that size mean nothing here: repeat on a quiet host, or with more --rounds and --budget."
        )


def _steps(rows: Sequence[LauncherRow], control: Control | None, asked: Compare, cores: int) -> Iterator[str]:
    """Whether the number of threads explains the steps, and how that is known."""
    torchrun, free = _of(rows, Way.TORCHRUN), _of(rows, Way.SPAWN) or _of(rows, Way.BY_HAND)
    if torchrun is None or free is None or free.step_ratio is None:
        return
    alike, how = noise(rows), _by(free.way.value)
    if torchrun.threads == free.threads:
        if _apart(free.step_ratio) > alike:
            yield (
                f"Steps: started {how} they take {free.step_ratio:.2f} times as long as torchrun's, although each rank "
                f"has {_threads(free.threads)} in both; nothing that was measured explains it. Repeat with more "
                "--rounds."
            )
        return
    yield (
        f"Threads: torchrun, run and launch set OMP_NUM_THREADS={torchrun.threads[0]} where nobody set it; mp.spawn "
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
        return found + "with so much noise that does not tell whether the threads are the difference."
    if _apart(control.step_ratio) <= max(alike, _REST * _apart(ratio)):
        return found + "the threads are the difference, not the way of starting."
    return found + "the threads alone do not explain it."


def _by(name: str) -> str:
    return name if name.startswith("by ") else f"by {name}"


def _threads(threads: Sequence[int]) -> str:
    least, most = min(threads), max(threads)
    if least == most:
        return "1 thread" if most == 1 else f"{most} threads"
    return f"{least} to {most} threads"


# The end -------------------------------------------------------------------------------------------------------------


def _verdict(rows: Sequence[LauncherRow], asked: Compare, told: int | None) -> tuple[str, int]:
    """The sentence, and the exit code: 1 if one fails or hangs, else 3 if one had no turn."""
    bad = [row.way.value for row in rows if row.ended in (Ended.FAILS, Ended.HANGS)]
    silent = [row.way.value for row in rows if row.ended is Ended.UNFINISHED]
    good = len(rows) - len(bad) - len(silent)
    parts = [f"{good or 'none'} of {len(rows)} ways of starting {_counted(asked.ranks, 'rank')} work"]
    if bad and len(bad) < len(rows):
        parts.append(f"{', '.join(bad)} {'does' if len(bad) == 1 else 'do'} not")
    if silent:
        parts.append(f"of {', '.join(silent)} nothing is known")
    code = ExitCode.UNFIT if bad else ExitCode.UNKNOWN if silent else ExitCode.FIT
    return "; ".join(parts), int(code) if told is None else 128 + told


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
