"""The end of the page: hosts to leave out, as a line to paste, and what to do about the first error."""

import pytest
from msgspec import structs
from reports import finding_of, fit, unfit

from ddpdiag.model import Finding, HostsLine, Report, WorldLine
from ddpdiag.render.exports import exclude_lines
from ddpdiag.render.terminal import render

NODES = tuple(f"n{host}" for host in range(8))


def report_of(*, bad: tuple[str, ...] = (), slow: dict[str, float] | None = None, scheduler: str = "") -> Report:
    world = WorldLine(size=8, nodes=NODES, launcher="torchrun", backend="gloo", scheduler=scheduler)
    return fit(world=world, hosts=HostsLine(bad=bad, slow=slow or {}))


def end_of(*findings: Finding, **fields: object) -> str:
    report = structs.replace(unfit(findings=findings), **fields)
    text = render(report, color=False, width=80)
    return text[text.index("UNFIT:", 60) :]


def test_without_slurm_the_bad_hosts_are_a_list_and_no_command() -> None:
    assert exclude_lines(report_of(bad=("n7", "n3"))) == (("The bad hosts:", "n[3,7]"),)
    assert exclude_lines(report_of(bad=("n7",))) == (("The bad host:", "n7"),)


def test_a_list_that_nobody_would_paste_is_a_file_without_slurm_too() -> None:
    many = tuple(f"rack{host}-node{host}" for host in range(0, 4000, 3))
    assert exclude_lines(report_of(bad=many)) == (("1,334 bad hosts, one a line:", "--exclude-file bad"),)


@pytest.mark.parametrize(
    ("slow", "said"),
    [
        ({"n1": 0.242}, "1 host is 24 % slower than most. Without it:"),
        ({"n1": 0.242, "n2": 0.208}, "2 hosts are 21 to 24 % slower than most. Without them:"),
    ],
)
def test_slow_hosts_are_one_list_with_how_slow_they_are(slow: dict[str, float], said: str) -> None:
    ((sentence, command),) = exclude_lines(report_of(slow=slow, scheduler="slurm"))
    assert sentence == said
    assert command == "srun --exclude=n1 ..." if len(slow) == 1 else "srun --exclude='n[1-2]' ..."


def test_who_leaves_out_the_slow_leaves_out_the_bad_as_well() -> None:
    bad, slow = exclude_lines(report_of(bad=("n7",), slow={"n1": 0.2, "n7": 0.3}, scheduler="slurm"))
    assert bad == ("Without the bad host:", "srun --exclude=n7 ...")
    assert slow == ("1 host is 20 % slower than most. Without it and the bad ones:", "srun --exclude='n[1,7]' ...")


def test_many_slow_hosts_are_all_in_the_list() -> None:
    slow = {f"rack{host}-node{host}": 0.2 for host in range(0, 4000, 3)}
    ((_, command),) = exclude_lines(report_of(slow=slow))
    assert command.count("rack") == len(slow)


def test_the_variables_of_the_way_out_stand_at_the_end_as_well() -> None:
    finding = finding_of(remedy="Set what follows.", env={"NCCL_P2P_DISABLE": "1"}, nodes=("n0",))
    assert end_of(finding).endswith("Fix: Set what follows.\n    export NCCL_P2P_DISABLE=1\n")


def test_the_way_out_is_that_of_the_error_which_the_verdict_names() -> None:
    nobody = finding_of(code="RDZ001.any", remedy="Look anywhere.")
    somebody = finding_of(nodes=("n1",), remedy="Look at n1.")
    assert "Fix: Look at n1." in end_of(nobody, somebody)


def test_of_several_culprits_of_one_kind_all_are_to_be_left_out() -> None:
    culprits = [finding_of(nodes=(name,), remedy=f"Look at {name}.") for name in ("n0", "n1")]
    text = " ".join(end_of(*culprits, hosts=HostsLine(bad=("n0", "n1"))).split())
    assert "Fix: Leave the 2 bad hosts out (see above). For each, as for the first: Look at n0." in text
