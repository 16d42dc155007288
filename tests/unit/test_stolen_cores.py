"""TRN001 names the processes that take the ranks' cores; TRN003 names those beside a straggler."""

from pathlib import Path

import pytest
from msgspec import structs
from seen import seen_of, with_arrivals
from test_trn001 import GOOD
from test_trn003 import steps

from ddpdiag.checks.api import Check, Seen
from ddpdiag.checks.training import ddp_step, mnist
from ddpdiag.checks.training.stolen_cores import stolen_core_findings
from ddpdiag.model import Finding, Severity
from ddpdiag.probes.host import programs
from ddpdiag.probes.host.programs import BusyProcess, CoreUse, CoreUseMeter

LIMITS = (0.2, 0.1)
HOG = BusyProcess(pid=4711, cores=0.66, last_core=1, user="bob", command="python burn.py")


def core_uses(
    ranks: int = 2,
    *,
    others: float = 0.66,
    idle: float = 0.0,
    steal: float = 0.0,
    waited: float | None = 0.5,
    processes: tuple[BusyProcess, ...] = (HOG,),
) -> dict[int, CoreUse]:
    """Ten seconds of ranks that share two cores with `others`; each waits for a core as long as it has one."""
    each = (2.0 - others - steal - idle) / ranks
    own = {
        rank: CoreUse(
            seconds=10.0, own_seconds=10 * each, waited_seconds=None if waited is None else 10 * each * waited,
            pids=(2000 + rank, 1000),
        )
        for rank in range(ranks)
    }  # fmt: skip
    workers = tuple(structs.replace(HOG, pid=pid, cores=each) for rank in own for pid in own[rank].pids[:1])
    busy = 5 * (2.0 - steal - idle)
    cores = {0: busy, 1: busy, 2: 10.0}  # the third one is none of the ranks'
    own[0] = structs.replace(
        own[0], busy_seconds=cores, steal_seconds={0: 10 * steal, 1: 0.0, 2: 5.0}, processes=workers + processes
    )
    return own


def on_two_cores(check: Check, rows: dict, cpus: str = "3", **changes: str) -> Seen:
    seen = seen_of(check, rows, ranks_per_node=len(rows))
    arrivals = seen.world.arrivals.items()
    return with_arrivals(seen, {rank: structs.replace(own, cpu_mask=cpus, **changes) for rank, own in arrivals})


def judged(uses: dict[int, CoreUse]) -> list[Finding]:
    rows = {rank: mnist.Data(training=GOOD) for rank in range(max(2, len(uses)))}
    return list(stolen_core_findings(on_two_cores(mnist.CHECK, rows), uses, *LIMITS))


def test_the_process_and_its_share_are_named(golden) -> None:
    (found,) = judged(core_uses())
    assert (found.code, found.severity, found.ranks, found.hosts) == (
        "TRN001.stolen-cores", Severity.WARNING, (), ("n0",)
    )  # fmt: skip
    assert found.evidence["pids"] == [4711]
    assert found.evidence["others_share"] == pytest.approx(0.33)
    assert found.evidence["slower_share"] == pytest.approx(0.33)
    golden(found)


def test_what_no_process_explains_is_told_by_its_share(golden) -> None:
    (found,) = judged(core_uses(processes=()))
    assert found.evidence["pids"] == []
    golden(found)


def test_other_virtual_machines_are_told_apart(golden) -> None:
    (found,) = judged(core_uses(others=0.1, steal=0.8, waited=0.0, processes=()))
    assert found.evidence["others_share"] == pytest.approx(0.45)
    golden(found)


@pytest.mark.parametrize(
    "uses",
    [
        core_uses(others=0.3),  # 15 % of the cores
        core_uses(waited=0.05),  # the ranks do not need these cores
        core_uses(waited=None),  # the kernel does not say
        core_uses(idle=0.6),  # the ranks wait for another reason
        core_uses(4, others=0.7),  # ranks wait for each other
        {0: core_uses()[0]},  # the other rank is not known
        {rank: structs.replace(use, busy_seconds={}) for rank, use in core_uses().items()},
    ],
)
def test_no_finding(uses: dict[int, CoreUse]) -> None:
    assert judged(uses) == []


def test_ranks_that_are_more_than_the_cores_and_much_else() -> None:
    (found,) = judged(core_uses(4, others=1.0))
    assert found.evidence["others_share"] == pytest.approx(0.5)


def test_supervisors_and_ranks_of_other_containers_are_no_others() -> None:
    assert judged(core_uses(others=0.66, processes=(structs.replace(HOG, pid=1000),))) == []
    rows = {rank: mnist.Data(training=GOOD) for rank in range(2)}
    seen = seen_of(mnist.CHECK, rows, ranks_per_node=1)
    one_boot = {rank: structs.replace(own, cpu_mask="3", host_id="boot") for rank, own in seen.world.arrivals.items()}
    (found,) = stolen_core_findings(with_arrivals(seen, one_boot), core_uses(), *LIMITS)
    assert (found.hosts, found.evidence["others_share"]) == (("n0", "n1"), pytest.approx(0.33))


def test_a_straggler_beside_a_busy_process_names_it(golden) -> None:
    uses = core_uses()
    slow = steps(2, slow={1: {"backward": 7e-3}})
    rows = {rank: ddp_step.Data(steps=slow[rank], core_use=uses[rank]) for rank in range(2)}
    (found,) = ddp_step.judge(on_two_cores(ddp_step.CHECK, rows))
    assert (found.code, found.ranks, found.evidence["class"]) == ("TRN003.straggler", (1,), "cores")
    golden(found)
    idle = {rank: structs.replace(own, core_use=core_uses(waited=0.0)[rank]) for rank, own in rows.items()}
    (found,) = ddp_step.judge(on_two_cores(ddp_step.CHECK, idle))
    assert found.evidence["class"] == "compute"


def process(
    root: Path, pid: int, ticks: int, *, parent: int = 1, core: int = 0, command: str = "", start: int = 7
) -> None:
    folder = root / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    fields = ["S", str(parent), *["0"] * 9, str(ticks), "0", *["0"] * 6, str(start), *["0"] * 16, str(core)]
    (folder / "stat").write_text(f"{pid} (a (name)) {' '.join(fields)}")
    if command:
        (folder / "cmdline").write_text(command.replace(" ", "\0"))


def host(root: Path, *cores: tuple[int, int], ran: int, waited: int) -> None:
    """/proc/stat with busy and stolen ticks of each core, and the times of this process's only thread in ns."""
    lines = [f"cpu{at} {busy} 0 0 900 0 50 60 {steal} 0 0" for at, (busy, steal) in enumerate(cores)]
    thread = root / "self" / "task" / "1"
    thread.mkdir(parents=True, exist_ok=True)
    (root / "stat").write_text("\n".join(["cpu 1 1 1 1 1 1 1 1 0 0", *lines, "intr 1"]))
    (thread / "schedstat").write_text(f"{ran} {waited} 5")


def test_the_use_of_cores_is_read_at_begin_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs.os, "sysconf", lambda _name: 100)
    host(tmp_path, (100, 0), (200, 10), ran=1, waited=10**9)
    process(tmp_path, 50, 1000, command="python burn.py --password hunter2")
    process(tmp_path, 51, 1000, parent=programs.os.getppid(), command="a rank of the same fork server")
    process(tmp_path, 52, 1000)
    watch = CoreUseMeter(whole_host=True, root=tmp_path)
    assert watch.use().processes == ()
    host(tmp_path, (400, 0), (300, 60), ran=2, waited=3 * 10**9)
    process(tmp_path, 50, 10**6, core=1, command="python burn.py --password hunter2")
    process(tmp_path, 51, 10**6, parent=programs.os.getppid())
    process(tmp_path, 52, 10**7, start=8)  # another process with the same pid
    use = watch.use()
    assert (use.busy_seconds, use.steal_seconds, use.waited_seconds) == ({0: 3.0, 1: 1.0}, {1: 0.5}, 2.0)
    assert [(own.pid, own.last_core) for own in use.processes] == [(52, 0), (50, 1)]
    unnamed, burning = (own.command for own in use.processes)
    assert unnamed == "[a (name)]"
    assert burning.startswith("python burn.py")
    assert "hunter2" not in burning
    assert CoreUseMeter(whole_host=False, root=tmp_path).use().busy_seconds == {}
    (tmp_path / "self" / "task" / "1" / "schedstat").write_text("0 0 0")
    assert CoreUseMeter(whole_host=False, root=tmp_path).use().waited_share is None
