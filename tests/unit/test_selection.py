"""Which checks a run takes."""

import pytest
from seen import world_of

from ddpdiag.checks.registry import all_checks, by_code
from ddpdiag.errors import UsageError
from ddpdiag.judgement.judged import asked_for, lacks_named_backend, selected, validate
from ddpdiag.model import Options


def codes(**options: object) -> set[str]:
    return {check.code for check in all_checks() if selected(check, Options(**options))}  # type: ignore[arg-type]


def test_everything_is_taken_by_default() -> None:
    assert codes() == {check.code for check in all_checks() if not check.by_name}


def test_a_benchmark_is_taken_by_its_whole_name_only() -> None:
    assert "COL002" not in codes(select=("COL",))
    assert "COL002" not in codes(stages=("collective",))
    assert codes(select=("COL002",)) == {"COL002"}


def test_a_prefix_takes_a_family() -> None:
    assert codes(select=("RDZ",)) == {check.code for check in all_checks() if check.code.startswith("RDZ")}


def test_ignoring_wins_over_selecting() -> None:
    assert codes(select=("RDZ",), ignore=("RDZ001",)) == codes(select=("RDZ",)) - {"RDZ001"}


def test_a_stage_takes_its_checks() -> None:
    assert codes(stages=("collective",)) == {"COL001"}
    assert "COL001" not in codes(skip_stages=("collective",))


def test_what_was_named_was_asked_for() -> None:
    by_code = {check.code: check for check in all_checks()}
    assert asked_for(by_code["GPU002"], Options(stages=("gpu",)))
    assert asked_for(by_code["GPU002"], Options(select=("GPU",)))
    assert not asked_for(by_code["GPU002"], Options(ignore=("COL",)))


def test_an_optional_check_is_asked_for_by_its_own_code_only() -> None:
    by_code = {check.code: check for check in all_checks()}
    assert not asked_for(by_code["RDZ006"], Options(stages=("rendezvous",)))
    assert not asked_for(by_code["RDZ006"], Options(select=("RDZ",)))
    assert asked_for(by_code["RDZ006"], Options(select=("RDZ006",)))


def test_a_named_backend_that_lacks_its_gpus_is_no_excuse() -> None:
    by_code = {check.code: check for check in all_checks()}
    world = world_of(2, options=Options(backend="nccl"))
    assert lacks_named_backend(by_code["COL001"], world)
    assert lacks_named_backend(by_code["TRN001"], world)
    assert not lacks_named_backend(by_code["RDZ001"], world)
    assert not lacks_named_backend(by_code["COL001"], world_of(1, gpus=1, options=Options(backend="nccl")))
    assert not lacks_named_backend(by_code["COL001"], world_of(2, options=Options(backend="gloo")))


def test_what_a_check_declares_can_be_set() -> None:
    validate(Options(settings={"RDZ001.repeat": "3", "COL001.deadline_seconds": "60"}), all_checks())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (Options(stages=("gpus",)), "--stage gpus: unknown stage; expected launch, host"),
        (Options(skip_stages=("run",)), "--skip-stage run: unknown stage"),
        (Options(select=("XYZ",)), "--select XYZ: unknown code; `ddpdiag checks` lists the codes"),
        (Options(ignore=("COL9",)), "--ignore COL9"),
        (Options(select=("P2P03",)), "--select P2P03: unknown code; did you mean P2P003"),
        (Options(select=("",)), "--select : unknown code"),
        (Options(settings={"COL9.x": "1"}), "--set COL9"),
        (Options(settings={"RDZ001.repeats": "1"}), "expected RDZ001.repeat, RDZ001.deadline_seconds"),
        (Options(settings={"RUN002.deadline_seconds": "1"}), "threshold of RUN002; there is none"),
        (Options(settings={"COL001.deadline_seconds": "0"}), "more than 0 seconds"),
    ],
)
def test_an_unknown_name_is_refused_with_what_there_is(options: Options, sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        validate(options, all_checks())
    assert sentence in str(error.value)


def test_who_names_the_stage_fabric_may_have_hosts_of_one_rank() -> None:
    options = Options(stages=("fabric",))
    assert asked_for(by_code("FAB001"), options)
    assert not asked_for(by_code("FAB002"), options)
    assert asked_for(by_code("FAB002"), Options(select=("FAB002",)))
