"""The shared directory, judged."""

import pytest
from msgspec import structs
from seen import seen_of, skip_text, world_of

from ddpdiag.checks.rendezvous import shared_dir
from ddpdiag.checks.rendezvous.shared_dir import CHECK, Data
from ddpdiag.model import RunOptions, Severity, Status
from ddpdiag.probes.host.shared_files import StoreFile

SHARED = RunOptions(shared_dir="/shared")


def host(**more):
    """What a host found; by itself, all is well."""
    return Data(directory="/shared", **more)


def seen(*answers, **more):
    return seen_of(CHECK, dict(enumerate(answers)), ranks_per_node=1, options=SHARED, **more)


def found(*answers):
    return {finding.code.partition(".")[2]: finding for finding in CHECK.judge(seen(*answers))}


def test_a_directory_that_works_is_silent():
    assert found(host(), host(), host(lock_is_local=False)) == {}


@pytest.mark.parametrize(
    ("errors", "hosts"),
    [
        *(((None, error, None), ("n1",)) for error in ("ENOENT", "EACCES", "EROFS", "ENOSPC", "EIO")),
        (("ENOSPC",) * 3, ()),
    ],
    ids=["ENOENT", "EACCES", "EROFS", "ENOSPC", "EIO", "on every host"],
)
def test_the_host_that_cannot_write_is_named_with_the_reason(golden, errors, hosts):
    (finding,) = found(*(host(error=error) for error in errors)).values()
    assert (finding.code, finding.severity, finding.hosts) == ("RDZ006.unwritable", Severity.ERROR, hosts)
    golden(finding)


@pytest.mark.parametrize(
    ("views", "hosts"),
    [
        pytest.param([(1,), (0, 2), (1,)], ("n1",), id="one of three"),
        pytest.param([(1,), (0,)], (), id="two hosts"),
        pytest.param([(1, 2), (0, 2), (0, 1)], (), id="each its own"),
    ],
)
def test_the_host_that_sees_another_directory_than_most_is_named(golden, views, hosts):
    findings = found(*[host(missing_ranks=view) for view in views])
    assert list(findings) == ["not-shared"]
    assert findings["not-shared"].hosts == hosts
    golden(findings["not-shared"])


def test_who_could_not_write_is_not_missed_by_the_others():
    assert list(found(host(), host(error="EROFS", missing_ranks=()), host())) == ["unwritable"]


LOCAL, SHARED_LOCK = host(lock_is_local=True), host(lock_is_local=False)


@pytest.mark.parametrize(
    ("answers", "hosts"),
    [
        pytest.param((host(), host(lock_error="ENOLCK"), host()), ("n1",), id="locking fails on one host"),
        pytest.param((host(), LOCAL, LOCAL), (), id="all other hosts get the lock of the first"),
        pytest.param((host(), LOCAL, SHARED_LOCK), ("n1",), id="one of three ignores it"),
        pytest.param((host(), LOCAL), (), id="of two hosts neither is blamed"),
        pytest.param(
            (host(lock_error="ENOLCK"), LOCAL, SHARED_LOCK), ("n0",), id="a first host that cannot lock held nothing"
        ),
    ],
)
def test_locks_that_do_not_work_are_an_error(golden, answers, hosts):
    findings = found(*answers)
    assert list(findings) == ["locks"]
    assert (findings["locks"].severity, findings["locks"].hosts) == (Severity.ERROR, hosts)
    golden(findings["locks"])


def test_a_store_of_an_earlier_job_is_a_warning_with_its_path_and_age(golden):
    finding = found(host(stores=(StoreFile("/shared/store", "bob", 438, 7200.0),)), host())["stale"]
    assert (finding.severity, finding.hosts) == (Severity.WARNING, ())
    assert "/shared/store" in finding.message
    golden(finding)


def test_without_a_directory_there_is_no_ground():
    assert skip_text(shared_dir.CHECK, world_of(2, options=SHARED)) is None
    assert "--shared-dir" in (skip_text(shared_dir.CHECK, world_of(2)) or "")


def test_one_rank_of_each_host_takes_part_as_far_as_64_hosts():
    run = seen_of(CHECK, {}, size=200, ranks_per_node=2, options=SHARED)
    before = type(run)(run.world, run.check, structs.replace(run.recording, trials=()))
    (trial,) = shared_dir.plan(before)
    assert trial.groups == (tuple(range(0, 128, 2)),)
    run = seen_of(CHECK, {0: host()}, size=200, ranks_per_node=2, options=SHARED)
    assert [finding.code for finding in CHECK.judge(run)] == ["RDZ006.partly"]


def test_what_cannot_be_used_is_known_to_other_checks():
    assert shared_dir.is_usable(seen(host(), host()))
    assert not shared_dir.is_usable(seen(host(), host(error="EROFS")))
    assert not shared_dir.is_usable(seen(host(), statuses={1: Status.HUNG}))


def test_not_to_see_the_file_of_a_host_that_gave_no_answer_means_nothing():
    partly = seen(host(missing_ranks=(2,)), host(missing_ranks=(2,)), size=3, statuses={2: Status.HUNG})
    assert list(CHECK.judge(partly)) == []
