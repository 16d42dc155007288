"""The launchers by which people start PyTorch training: what each turn gave, and the result of each launcher.

Times are seconds. What was not measured is `None`. Of several rounds the best counts, for each figure by itself: what
else runs on the host only ever makes things slower.
"""

import statistics
from collections.abc import Iterator, Sequence
from enum import Enum

from msgspec import Struct, field

from ddpdiag.checks.known_errors import with_meaning
from ddpdiag.errors import ExitCode
from ddpdiag.model.train import Ended
from ddpdiag.text import count

# Two runs of the same training differ by less than this on a quiet host; no explanation is sought for less.
_ALIKE = 0.1
# What remains of a difference without its cause, at most.
_REST = 0.2

LAUNCHERS_SCHEMA = "ddpdiag.launchers/1"


class LaunchMethod(Enum):
    """How the ranks of one host are started, under the names that users know; torchrun, first, is the measure."""

    TORCHRUN = "torchrun"
    RUN = "torch.distributed.run"
    LAUNCH = "torch.distributed.launch"
    LAUNCH_USE_ENV = "launch --use-env"
    SPAWN = "mp.spawn"
    BY_HAND = "by hand"


# How the commands of torch's launchers begin (torch/distributed/run.py and launch.py).
HEADS = {
    LaunchMethod.TORCHRUN: ("torchrun",),
    LaunchMethod.RUN: ("python", "-m", "torch.distributed.run"),
    LaunchMethod.LAUNCH: ("python", "-m", "torch.distributed.launch"),
    LaunchMethod.LAUNCH_USE_ENV: ("python", "-m", "torch.distributed.launch", "--use-env"),
}


def typed(method: LaunchMethod, ranks: int) -> str:
    """What a user would type for a script of their own."""
    if method is LaunchMethod.SPAWN:
        return f"python train.py, which calls torch.multiprocessing.spawn(main, nprocs={ranks})"
    if method is LaunchMethod.BY_HAND:
        return f"RANK=0 WORLD_SIZE={ranks} MASTER_ADDR=... MASTER_PORT=... python train.py, once for each rank"
    return f"{' '.join(HEADS[method])} --nproc-per-node {ranks} train.py"


class RankTimes(Struct, frozen=True, kw_only=True):
    """What one rank of a training wrote down. Moments are of time.monotonic(), one clock for all processes of a host.

    `learnt_from` is the source of its rank. `began_at`: its first own line ran; `imported_at`: torch was imported;
    `group_at`: every rank had answered in the process group. `step_seconds` holds the timed steps, in their order.
    `threads` is torch.get_num_threads().
    """

    rank: int
    world_size: int
    learnt_from: str
    threads: int
    backend: str
    device: str
    torch_version: str
    began_at: float
    imported_at: float
    group_at: float
    step_seconds: tuple[float, ...]


class RankError(Struct, frozen=True, kw_only=True):
    """Why one rank gave up, and when (time.monotonic()): the earliest is the cause, what follows are echoes."""

    rank: int
    error: str
    at: float


class Start(Struct, frozen=True, kw_only=True):
    """One training, started by one method: what was seen of it from outside, and what its ranks wrote.

    `begun_at` is just before the first command was started. `reason` is empty if all of it worked.
    """

    method: LaunchMethod
    begun_at: float
    seconds: float
    ended: Ended
    reason: str = ""
    ranks: tuple[RankTimes, ...] = ()


class Compare(Struct, frozen=True, kw_only=True):
    """What is compared. `batch_size` counts images of a step over all ranks; each method has its turn once a round."""

    ranks: int
    steps: int = 30
    batch_size: int = 64
    rounds: int = 2
    backend: str = "auto"
    data_dir: str | None = None
    budget_seconds: float = 120.0


class Round(Struct, frozen=True, kw_only=True):
    """One turn that worked. `start_seconds` go from the command's start until the slowest rank was in the group.

    `launcher_seconds` of them passed until the last rank ran its first line, `import_seconds` is the slowest import of
    torch. `step_seconds` is the median over the timed steps, of the slowest rank.
    """

    start_seconds: float
    launcher_seconds: float
    import_seconds: float
    step_seconds: float
    seconds: float


class LauncherRow(Struct, frozen=True, kw_only=True):
    """One line of the table: the best of all rounds, each figure for itself, and its ratio to torchrun's.

    `threads` are those of each rank, by rank. `command` is what a user would type.
    """

    method: LaunchMethod = field(name="way")
    command: str
    ended: Ended
    reason: str = ""
    learnt_from: str | None = None
    threads: tuple[int, ...] = ()
    start_seconds: float | None = None
    start_ratio: float | None = None
    launcher_seconds: float | None = None
    import_seconds: float | None = None
    step_seconds: float | None = None
    step_ratio: float | None = None
    rounds: tuple[Round, ...] = ()


class Control(Struct, frozen=True, kw_only=True):
    """The experiment that shows whether threads explain the steps: `method`, with torchrun's OMP_NUM_THREADS."""

    method: LaunchMethod = field(name="way")
    omp_num_threads: int
    threads: tuple[int, ...]
    step_seconds: float
    step_ratio: float


class LaunchersReport(Struct, frozen=True, kw_only=True):
    """The table, judged. `explained` are sentences on what makes the difference, each from what was measured."""

    asked: Compare
    host: str
    cores: int
    seconds: float
    rows: tuple[LauncherRow, ...]
    explained: tuple[str, ...]
    sentence: str
    exit_code: int
    control: Control | None = None
    device: str | None = None
    backend: str | None = None
    torch_version: str | None = None
    schema: str = LAUNCHERS_SCHEMA


def judged(
    asked: Compare,
    starts: Sequence[Start],
    controls: Sequence[Start] = (),
    *,
    host: str,
    cores: int,
    seconds: float,
    told: int | None = None,
) -> LaunchersReport:
    """The table of all turns, in their order, on this host; `told` is the signal that ended them early."""
    torchrun = _best(_rounds(starts, LaunchMethod.TORCHRUN))
    rows = tuple(_row(asked, starts, method, torchrun, told) for method in LaunchMethod)
    control = None
    tried = next((start for start in controls if start.ended is Ended.WORKS), None)
    if tried and torchrun and (best := _best(_rounds(controls, tried.method))):
        control = Control(
            method=tried.method,
            omp_num_threads=tried.ranks[0].threads,
            threads=tuple(rank.threads for rank in tried.ranks),
            step_seconds=best.step_seconds,
            step_ratio=best.step_seconds / torchrun.step_seconds,
        )
    first = next((rank for start in starts for rank in start.ranks), None)
    sentence, code = _verdict(rows, asked, told)
    return LaunchersReport(
        asked=asked,
        host=host,
        cores=cores,
        seconds=seconds,
        rows=rows,
        control=control,
        explained=tuple(_explained(rows, control, asked, cores)),
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


def _row(
    asked: Compare, starts: Sequence[Start], method: LaunchMethod, torchrun: Round | None, told: int | None
) -> LauncherRow:
    command = typed(method, asked.ranks)
    turns = [start for start in starts if start.method is method]
    if not turns:
        early = "no time was left; give more --budget" if told is None else "the run was interrupted before its turn"
        return LauncherRow(method=method, command=command, ended=Ended.UNFINISHED, reason=early)
    bad = next((start for start in turns if start.ended is not Ended.WORKS), None)
    which = f"in round {turns.index(bad) + 1} of {len(turns)}: " if bad and len(turns) > 1 else ""
    ranks = next((start.ranks for start in turns if start.ended is Ended.WORKS), ())
    rounds = _rounds(turns, method)
    best = _best(rounds)
    return LauncherRow(
        method=method,
        command=command,
        ended=bad.ended if bad else Ended.WORKS,
        reason=f"{which}{with_meaning(bad.reason)}" if bad else "",
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


# Why -----------------------------------------------------------------------------------------------------------------


def _apart(ratio: float | None) -> float:
    """0.25 for a ratio of 1.25 or 0.8."""
    return max(ratio, 1 / ratio) - 1 if ratio else 0.0


def _explained(rows: Sequence[LauncherRow], control: Control | None, asked: Compare, cores: int) -> Iterator[str]:
    """How large the noise is, where the seconds before the group go, and whether threads explain the steps."""
    known = {row.method: row for row in rows if row.start_seconds is not None}
    spawn, hand = known.get(LaunchMethod.SPAWN), known.get(LaunchMethod.BY_HAND)
    if (torchrun := known.get(LaunchMethod.TORCHRUN)) is None:
        return
    # How far apart two turns of one program are here: torchrun is torch.distributed.run, whatever it is called.
    same = known.get(LaunchMethod.RUN)
    if same and max(_apart(same.start_ratio), _apart(same.step_ratio)) > _ALIKE:
        yield (
            "Noise: torchrun and torch.distributed.run are one program, and yet the second took "
            f"{same.start_ratio:.2f} times as long to start and {same.step_ratio:.2f} times for a step. Differences of "
            "that size mean nothing here: repeat on a quiet host, or with more --rounds and --budget."
        )
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
    free = spawn or hand
    if free is None or free.step_ratio is None:
        return
    alike = max(_ALIKE, _apart(same.step_ratio) if same else 0.0)
    how = free.method.value if free.method is LaunchMethod.BY_HAND else f"by {free.method.value}"
    if torchrun.threads != free.threads:
        yield (
            f"Threads: torchrun, run and launch set OMP_NUM_THREADS={torchrun.threads[0]} where it is not set; "
            f"mp.spawn and by hand do not, so each of their {asked.ranks} ranks takes {_threads(free.threads)}, "
            f"{sum(free.threads)} on {count(cores, 'core')}. {_experiment(how, free.step_ratio, control, alike)}"
        )
    elif _apart(free.step_ratio) > alike:
        yield (
            f"Steps: started {how} they take {free.step_ratio:.2f} times as long as torchrun's, although each rank "
            f"has {_threads(free.threads)} in both; nothing that was measured explains it. Repeat with more "
            "--rounds."
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
    return count(most, "thread") if least == most else f"{least} to {most} threads"


def _verdict(rows: Sequence[LauncherRow], asked: Compare, told: int | None) -> tuple[str, int]:
    """The sentence, and the exit code: 1 if one fails or hangs, else 3 if one had no turn."""
    bad = [row.method.value for row in rows if row.ended in (Ended.FAILS, Ended.HANGS)]
    silent = [row.method.value for row in rows if row.ended is Ended.UNFINISHED]
    good = len(rows) - len(bad) - len(silent)
    ranks, work = count(asked.ranks, "rank"), "works" if good == 1 else "work"
    parts = [f"{good or 'none'} of {len(rows)} launch methods {work} for {ranks}"]
    if bad and len(bad) < len(rows):
        parts.append(f"{', '.join(bad)} {'does' if len(bad) == 1 else 'do'} not")
    if silent:
        parts.append(f"not finished: {', '.join(silent)}")
    code = ExitCode.UNFIT if bad else ExitCode.UNKNOWN if silent else ExitCode.FIT
    return "; ".join(parts), int(code) if told is None else 128 + told
