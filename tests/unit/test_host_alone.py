"""A host that is asked alone: what its options take, how it is judged, and what its page says. No process."""

from dataclasses import replace

import pytest
from msgspec import structs
from seen import arrival_of, seen_of, world_of

from ddpdiag.checks.api import Nothing, Seen
from ddpdiag.checks.gpu import present
from ddpdiag.checks.host import memory
from ddpdiag.checks.registry import all_checks, check_by_code
from ddpdiag.checks.run import budget, trials
from ddpdiag.cli.host import WITH_TORCH, WITHOUT_TORCH, codes
from ddpdiag.judgement import judge
from ddpdiag.model import Kind, Outcome, ProcessState, Recording, Report, RunOptions, Status, Trial
from ddpdiag.model.options import ALONE
from ddpdiag.model.recording import End, Header
from ddpdiag.probes.gpu.nvml import Enumeration, Trouble
from ddpdiag.render import terminal

SLEEPS = ProcessState(pid=7, state="S", step_seconds=4.0)


def hung(options: RunOptions, process: ProcessState, *, hurried: bool) -> Seen[Nothing]:
    """A trial of GPU003 that did not end on the only rank."""
    trial = Trial(code="GPU003", groups=((0,),), kind=Kind.PLAIN, deadline_seconds=4.0, number=1, is_shortened=hurried)
    outcome = Outcome(
        trial=1,
        code="GPU003",
        rank=0,
        status=Status.HUNG,
        step_count=3,
        last_step="GPU 5 (PCI 0000:65:00.0)",
        process=process,
    )
    header = Header(run_id="r", world_size=1, launcher=ALONE, options=options, created="", version="")
    recording = Recording(header=header, arrivals={0: arrival_of(0, 1)}, trials=(trial,), outcomes=(outcome,))
    return Seen(world_of(1, options=options), trials.CHECK, recording)


def words(seen: Seen[Nothing]) -> list[str]:
    return [finding.code for check in (trials, budget) for finding in check.judge(replace(seen, check=check.CHECK))]


@pytest.mark.parametrize(
    ("options", "process", "hurried", "found"),
    [
        # Some drivers take half a minute to start their GPUs: within less than the check's own time nothing is known.
        (RunOptions(alone=True), SLEEPS, True, ["RUN004.unfinished"]),
        (RunOptions(alone=True), SLEEPS, False, ["RUN003.hung"]),
        (RunOptions(alone=True), structs.replace(SLEEPS, state="D"), True, ["RUN003.hung"]),
        (RunOptions(), SLEEPS, True, ["RUN003.hung"]),
    ],
)
def test_a_hang_on_a_host_alone_needs_the_whole_time_or_the_kernel_to_be_one(options, process, hurried, found):
    assert words(hung(options, process, hurried=hurried)) == found


def test_what_had_not_ended_is_named_with_where_it_stood(golden):
    (finding,) = budget.judge(replace(hung(RunOptions(alone=True), SLEEPS, hurried=True), check=budget.CHECK))
    assert (finding.code, finding.ranks, finding.hosts) == ("RUN004.unfinished", (), ())
    golden(finding)


def report(left_bytes: int) -> Report:
    """A host with so much memory, of which nothing else is known."""
    data = memory.Data(available_bytes=left_bytes, left_bytes=None, oom_kills=0)
    seen = seen_of(memory.CHECK, {0: data}, size=1, options=RunOptions(alone=True))
    header = structs.replace(seen.recording.header, launcher=ALONE, checks=("HST002",), options=RunOptions(alone=True))
    return judge(structs.replace(seen.recording, header=header, end=End(seconds=0.1)), all_checks())


def test_the_sentence_speaks_of_the_host(golden):
    fit, unfit = report(1 << 40), report(100 << 20)
    assert (fit.exit_code, unfit.exit_code) == (0, 1)
    golden(fit.sentence, unfit.sentence, terminal.render(unfit, color=False, width=80).splitlines()[0])


def test_a_finding_blames_the_host_and_no_rank(golden):
    (finding,) = report(100 << 20).findings
    assert (finding.code, finding.ranks, finding.hosts) == ("HST002.short", (), ("n0",))
    lacking = present.Data(nvml=Enumeration(trouble=Trouble.ABSENT, error="NVML Shared Library Not Found"))
    seen = seen_of(present.CHECK, {0: lacking}, size=1, options=RunOptions(alone=True, expect_gpus=8))
    (fewer,) = present.judge(seen)
    assert (fewer.code, fewer.ranks, fewer.hosts) == ("GPU001.fewer", (), ("n0",))
    (hangs,) = trials.judge(replace(hung(RunOptions(alone=True), SLEEPS, hurried=False), check=trials.CHECK))
    assert (hangs.code, hangs.ranks, hangs.hosts) == ("RUN003.hung", (), ("n0",))
    golden(hangs)


def test_its_page_has_no_table_of_ranks():
    assert "rank  local" not in terminal.render(report(100 << 20), color=False, width=80, details=True)


def test_without_torch_no_check_needs_it_and_none_is_taken_that_needs_a_peer():
    chosen = [check_by_code(code) for code in codes(torch=False)]
    assert {check.kind for check in chosen} == {Kind.PLAIN}
    assert {check.stage.value for check in chosen} == {"host", "gpu"}
    # Each of these two stages is taken whole: what comes to them later must be told here as well.
    whole = {check.code for check in all_checks() if check.stage.value in ("host", "gpu")}
    assert whole == {*WITHOUT_TORCH, *WITH_TORCH} - {"LCH003"}


def test_another_reader_judges_only_the_checks_that_ran():
    lines = {line.code for line in report(1 << 40).checks}
    assert {code for code in lines if not code.startswith(("RUN", "CMP"))} == {"HST002"}
