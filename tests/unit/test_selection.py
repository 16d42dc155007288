"""Which checks a run takes."""

import pytest
from msgspec import structs
from seen import unseen, world_of

from ddpdiag.checks.registry import ONLY_BY_WHOLE_CODE, SOAK, all_checks, check_by_code
from ddpdiag.checks.world import World, no_gpu_reason
from ddpdiag.errors import UsageError
from ddpdiag.judgement.doubt import misses_requested_backend
from ddpdiag.judgement.selection import is_selected, validate
from ddpdiag.model import RunOptions, Skip


def codes(**options: object) -> set[str]:
    return {check.code for check in all_checks() if is_selected(check, RunOptions(**options))}  # type: ignore[arg-type]


def test_everything_is_taken_by_default() -> None:
    assert codes() == {check.code for check in all_checks() if check.code not in (*ONLY_BY_WHOLE_CODE, SOAK)}


def test_a_benchmark_is_taken_by_its_whole_name_only() -> None:
    assert "COL002" not in codes(select=("COL",))
    assert "COL002" not in codes(stages=("collective",))
    assert codes(select=("COL002",)) == {"COL002"}


def test_a_soak_is_taken_by_its_duration_only() -> None:
    assert SOAK not in codes(select=("TRN",)) | codes(stages=("training",))
    assert SOAK in codes(soak_seconds=60.0) & codes(soak_seconds=60.0, select=("TRN",))


def test_a_prefix_takes_a_family() -> None:
    assert codes(select=("RDZ",)) == {check.code for check in all_checks() if check.code.startswith("RDZ")}


def test_ignoring_wins_over_selecting() -> None:
    assert codes(select=("RDZ",), ignore=("RDZ001",)) == codes(select=("RDZ",)) - {"RDZ001"}


def test_a_stage_takes_its_checks() -> None:
    assert codes(stages=("collective",)) == {"COL001", "COL003"}
    assert "COL001" not in codes(skip_stages=("collective",))


def is_excused(code: str, world: World) -> bool:
    check = check_by_code(code)
    reason = check.skip(unseen(check, world))
    assert reason is not None
    return reason.skip(check, world.options).is_inapplicable


@pytest.mark.parametrize(
    ("code", "options", "excused"),
    [
        ("GPU002", RunOptions(), True),
        ("GPU002", RunOptions(ignore=("COL",)), True),
        ("GPU002", RunOptions(stages=("gpu",)), False),
        ("GPU002", RunOptions(select=("GPU",)), False),
        # Optional: only its whole code requests it.
        ("RDZ006", RunOptions(stages=("rendezvous",)), True),
        ("RDZ006", RunOptions(select=("RDZ",)), True),
        ("RDZ006", RunOptions(select=("RDZ006",)), False),
        ("FAB001", RunOptions(stages=("fabric",)), False),
        ("FAB002", RunOptions(stages=("fabric",)), True),
        ("FAB002", RunOptions(select=("FAB002",)), False),
    ],
)
def test_what_does_not_apply_is_excused_unless_requested(code: str, options: RunOptions, excused: bool) -> None:
    assert is_excused(code, world_of(1, options=options)) is excused


def test_a_named_backend_that_lacks_its_gpus_is_no_excuse() -> None:
    lacking = Skip(
        code="COL001", reason=str(no_gpu_reason(world_of(2, options=RunOptions(backend="nccl")))), is_inapplicable=True
    )
    assert misses_requested_backend(lacking, world_of(2, options=RunOptions(backend="nccl")))
    assert not misses_requested_backend(lacking, world_of(2, gpus=1, options=RunOptions(backend="nccl")))
    assert not misses_requested_backend(lacking, world_of(2, options=RunOptions(backend="gloo")))
    assert not misses_requested_backend(
        structs.replace(lacking, reason="x"), world_of(2, options=RunOptions(backend="nccl"))
    )


def test_what_a_check_declares_can_be_set() -> None:
    validate(RunOptions(settings={"RDZ001.repeat": "3", "COL001.deadline_seconds": "60"}), all_checks())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (RunOptions(stages=("gpus",)), "--stage gpus: unknown stage; expected launch, host"),
        (RunOptions(skip_stages=("run",)), "--skip-stage run: unknown stage"),
        (RunOptions(select=("XYZ",)), "--select XYZ: unknown code; `ddpdiag checks` lists the codes"),
        (RunOptions(ignore=("COL9",)), "--ignore COL9"),
        (RunOptions(select=("P2P03",)), "--select P2P03: unknown code; did you mean P2P003"),
        (RunOptions(select=("",)), "--select : unknown code"),
        (RunOptions(select=(SOAK,)), "--select TRN004: the check needs the time that it may take, such as --soak 30m"),
        (RunOptions(soak_seconds=60.0, stages=("host",)), "leaves out TRN004, which runs the soak"),
        (RunOptions(settings={"COL9.x": "1"}), "--set COL9"),
        (RunOptions(settings={"RDZ001.repeats": "1"}), "expected RDZ001.repeat, RDZ001.deadline_seconds"),
        (RunOptions(settings={"RUN002.deadline_seconds": "1"}), "threshold of RUN002; there is none"),
        (RunOptions(settings={"COL001.deadline_seconds": "0"}), "more than 0 seconds"),
    ],
)
def test_an_unknown_name_is_refused_with_what_there_is(options: RunOptions, sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        validate(options, all_checks())
    assert sentence in str(error.value)
