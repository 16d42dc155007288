"""Simulated runs of P2P003: what its plan asks for is answered by a world in which certain things do not work."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from msgspec import Raw, structs
from seen import world_of

from ddpdiag.checks.api import Seen, new_trial
from ddpdiag.checks.collective import all_reduce
from ddpdiag.checks.gpu import devices
from ddpdiag.checks.launch import variables as lch002
from ddpdiag.checks.p2p.fallback import check as fallback
from ddpdiag.codec import encode
from ddpdiag.judgement.stages import trials_seconds
from ddpdiag.model import End, Event, EventKind, Finding, Outcome, Recording, RunOptions, Status, Trial
from ddpdiag.model.recording import Header
from ddpdiag.runtime.coordinator.dispatch import numbered_trial
from ddpdiag.runtime.deadlines import DEADLINES
from ddpdiag.stats import samples

# How a group of ranks does with these variables: the status of its ranks (DONE for right values) and seconds.
Answer = Callable[[tuple[int, ...], Mapping[str, str | None]], tuple[Status, float]]

LARGE = 64 << 20
HANGS = (Status.HUNG, 10.0)
WORKS = (Status.DONE, 0.01)
P2P = {"NCCL_P2P_DISABLE": "1"}


def uuid_of(rank: int) -> str:
    return f"GPU-{rank:02}"


def hangs_unless(variables: Mapping[str, str | None], *, pair: Sequence[int] = ()) -> Answer:
    """Every group hangs that holds `pair`, unless these variables are set."""

    def answer(group: tuple[int, ...], env: Mapping[str, str | None]) -> tuple[Status, float]:
        mended = all(env.get(name, "as it is") == value for name, value in variables.items())
        return WORKS if mended or not set(pair) <= set(group) else HANGS

    return answer


class Run:
    """A run up to the fallback search, which `search` then runs; a trial takes its seconds, and those that work 2 s."""

    def __init__(
        self,
        ranks: int,
        answer: Answer,
        *,
        per_host: int = 8,
        gloo: float | None = 0.05,
        variables: Mapping[int, Mapping[str, str]] | None = None,
        options: RunOptions | None = None,
    ) -> None:
        self.world = world_of(ranks, ranks_per_node=per_host, gpus=per_host, options=options or RunOptions())
        self._answer = answer
        header = Header(
            run_id="hand", world_size=ranks, launcher="hand", options=self.world.options, created="", version="0"
        )
        self.recording = Recording(header=header, arrivals=self.world.arrivals)
        self.told(lch002.CHECK, {rank: lch002.Data(dict((variables or {}).get(rank, {})), {}) for rank in range(ranks)})
        gpus = {
            rank: devices.Data(torch="2", cuda="12", gpus=(devices.TorchGpu("H100", uuid_of(rank)),), chosen=0)
            for rank in range(ranks)
        }
        self.told(devices.CHECK, gpus)
        self._col001("gloo", (Status.DONE, gloo) if gloo is not None else HANGS)
        self._col001("nccl", answer(tuple(range(ranks)), {}))

    @property
    def seen(self) -> Seen[fallback.Data]:
        return Seen(self.world, fallback.CHECK, self.recording)

    def search(self, most: int = 80) -> "Run":
        """Every trial that the plan asks for, within the budget, as the coordinator runs them."""
        for _ in range(most):
            left = self.world.options.budget_seconds - DEADLINES.reserve - trials_seconds(self.recording.outcomes)
            trials = fallback.plan(replace(self.seen, left_seconds=left))
            if not trials:
                self.recording = structs.replace(self.recording, end=End(seconds=60.0))
                return self
            for trial in trials:
                self.take(trial)
        raise AssertionError("it goes on for ever")

    def take(self, planned: Trial) -> None:
        trial = numbered_trial(planned, len(self.recording.trials) + 1, planned.deadline_seconds, 1e9)
        self._add(trial, [o for group in trial.groups for o in self._outcomes(trial, group)])

    def findings(self) -> list[Finding]:
        return list(fallback.judge(self.seen))

    def tried(self) -> list[tuple[str, str]]:
        """Part and set of every trial of the search, in order."""
        return [(str(trial.params["part"]), str(trial.params["set"])) for trial in self.seen.trials]

    def lose(self, rank: int) -> None:
        event = Event(kind=EventKind.LOST, rank=rank, seconds=30.0)
        self.recording = structs.replace(self.recording, events=(*self.recording.events, event))
        self.world = structs.replace(self.world, inactive_ranks=self.world.inactive_ranks | {rank})

    def cut(self, outcomes: int) -> Seen[fallback.Data]:
        """The run as a recording shows it that ends after so many outcomes: trials are written before them."""
        kept = self.recording.outcomes[:outcomes]
        last = kept[-1].trial if kept else 0
        trials = tuple(trial for trial in self.recording.trials if trial.number <= last + 1)
        recording = structs.replace(self.recording, outcomes=kept, trials=trials, end=None)
        return Seen(self.world, fallback.CHECK, recording)

    def _outcomes(self, trial: Trial, group: tuple[int, ...]) -> list[Outcome]:
        status, seconds = self._answer(group, trial.env)
        data = fallback.Data("nccl", len(group), LARGE, samples([seconds]), 0)
        return [
            Outcome(
                trial=trial.number,
                code=trial.code,
                rank=rank,
                status=status,
                seconds=2.0 if status is Status.DONE else seconds,
                **({"data": Raw(encode(data))} if status is Status.DONE else {}),
            )
            for rank in group
        ]

    def _col001(self, backend: str, answer: tuple[Status, float]) -> None:
        size, (status, seconds) = self.world.size, answer
        row = all_reduce.Data(backend, size, 4, samples([1e-4]), LARGE, samples([seconds]), 0)
        self.told(all_reduce.CHECK, dict.fromkeys(range(size), row), status, {"backend": backend})

    def told(self, check, rows, status=Status.DONE, params=None) -> None:
        """What another check saw."""
        trial = structs.replace(
            new_trial(Seen(self.world, check, self.recording), params=params), number=len(self.recording.trials) + 1
        )
        self._add(
            trial,
            [
                Outcome(
                    trial=trial.number, code=check.code, rank=rank, status=status, seconds=0.1, data=Raw(encode(row))
                )
                if status is Status.DONE
                else Outcome(trial=trial.number, code=check.code, rank=rank, status=status, seconds=10.0)
                for rank, row in rows.items()
            ],
        )

    def _add(self, trial: Trial, outcomes: Sequence[Outcome]) -> None:
        self.recording = structs.replace(
            self.recording, trials=(*self.recording.trials, trial), outcomes=(*self.recording.outcomes, *outcomes)
        )
