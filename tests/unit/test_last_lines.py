"""The end of the page: hosts to leave out, as a line to paste, and what to do about the first error."""

import subprocess
from pathlib import Path

import pytest
from reports import finding_of, fit, unfit

from ddpdiag.model import HostLists, Report, WorldSummary
from ddpdiag.render.shell import exclude_lines
from ddpdiag.render.terminal import render

NODES = tuple(f"n{host}" for host in range(8))


def report_of(*, bad: tuple[str, ...] = (), slow: dict[str, float] | None = None, scheduler: str = "") -> Report:
    nodes = NODES if slow is None or len(slow) < len(NODES) else (*slow, *(f"idle{number}" for number in range(999)))
    world = WorldSummary(size=8, hosts=nodes, launcher="torchrun", backend="gloo", scheduler=scheduler)
    return fit(world=world, hosts=HostLists(failing=bad, slow=slow or {}))


MANY = tuple(f"rack{host}-node{host}" for host in range(0, 1000, 3))
WAYS = {
    "a bad host without slurm": {"bad": ("n7",)},
    "bad hosts without slurm": {"bad": ("n7", "n3")},
    "a list that nobody would paste": {"bad": MANY},
    "a slow host": {"slow": {"n1": 0.242}, "scheduler": "slurm"},
    "slow hosts": {"slow": {"n1": 0.242, "n2": 0.208}, "scheduler": "slurm"},
    "bad and slow hosts": {"bad": ("n7",), "slow": {"n1": 0.2, "n7": 0.3}, "scheduler": "slurm"},
}


@pytest.mark.parametrize("hosts", WAYS.values(), ids=WAYS)
def test_bad_and_slow_hosts_are_left_out_by_a_line_to_paste(golden, hosts) -> None:
    golden(*("\n".join(line) for line in exclude_lines(report_of(**hosts))))


def test_many_slow_hosts_are_a_file() -> None:
    ((sentence, command),) = exclude_lines(report_of(slow=dict.fromkeys(MANY, 0.2)))
    assert "--write-slow-hosts slow" in sentence
    assert command.startswith("awk ")


HOSTFILE = """\
n1 slots=8
n10 slots=8
  n1-ib:4
n1.cluster:8
rack.n1
n.2
nx2
gpu-1:8
gpu-1-2
"""


@pytest.mark.parametrize("as_file", [False, True])
def test_the_line_leaves_out_these_hosts_and_no_others(tmp_path: Path, as_file: bool) -> None:
    many = tuple(f"other{number:04d}" for number in range(200 if as_file else 0))
    ((_, command),) = exclude_lines(report_of(bad=("n1", "n.2", "gpu-1", *many)))
    (tmp_path / "hostfile").write_text(HOSTFILE)
    (tmp_path / "failing").write_text("n1\nn.2\ngpu-1\n")
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert done.stderr == ""
    left = (tmp_path / "healthy-hosts").read_text().split("\n")
    assert left[:-1] == ["n10 slots=8", "  n1-ib:4", "rack.n1", "nx2", "gpu-1-2"]


def test_half_of_the_hosts_are_not_left_out_for_being_slow() -> None:
    """Two of three hosts, on cores that another job uses as well: the third one may be no better."""
    assert exclude_lines(report_of(slow=dict.fromkeys(NODES[:4], 0.87), scheduler="slurm")) == ()


CULPRITS = tuple(finding_of(hosts=(name,), fix=f"Look at {name}.") for name in ("n0", "n1"))
ENDS = {
    "with its variables": unfit(
        findings=(finding_of(fix="Set what follows.", env={"NCCL_P2P_DISABLE": "1"}, hosts=("n0",)),)
    ),
    "of the error that the verdict names": unfit(
        findings=(finding_of(code="RDZ001.any", fix="Look anywhere."), CULPRITS[1])
    ),
    "of several culprits of one kind": unfit(findings=CULPRITS, hosts=HostLists(failing=("n0", "n1"))),
}


@pytest.mark.parametrize("report", ENDS.values(), ids=ENDS)
def test_the_way_out_stands_at_the_end(golden, report: Report) -> None:
    text = render(report, color=False, width=80)
    golden(text[text.index("UNFIT:", 60) :])
