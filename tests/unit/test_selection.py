"""Which checks a run takes."""

import pytest

from ddpdiag.checks import all_checks
from ddpdiag.errors import UsageError
from ddpdiag.judgement.selection import asked_for, selected, validate
from ddpdiag.model import Options


def codes(**options: object) -> set[str]:
    return {check.code for check in all_checks() if selected(check, Options(**options))}  # type: ignore[arg-type]


def test_everything_is_taken_by_default() -> None:
    assert codes() == {check.code for check in all_checks()}


def test_a_prefix_takes_a_family() -> None:
    assert codes(select=("RDZ",)) == {"RDZ001", "RDZ002"}


def test_ignoring_wins_over_selecting() -> None:
    assert codes(select=("RDZ",), ignore=("RDZ001",)) == {"RDZ002"}


def test_a_stage_takes_its_checks() -> None:
    assert codes(stages=("collective",)) == {"COL001"}
    assert "COL001" not in codes(skip_stages=("collective",))


def test_what_was_named_was_asked_for() -> None:
    by_code = {check.code: check for check in all_checks()}
    assert asked_for(by_code["GPU002"], Options(stages=("gpu",)))
    assert asked_for(by_code["GPU002"], Options(select=("GPU",)))
    assert not asked_for(by_code["GPU002"], Options(ignore=("COL",)))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (Options(stages=("gpus",)), "--stage gpus: no such thing; the stages are launch, host"),
        (Options(skip_stages=("run",)), "--skip-stage run: no such thing"),
        (Options(select=("XYZ",)), "--select XYZ: no such thing; the codes are LCH001"),
        (Options(ignore=("COL9",)), "--ignore COL9"),
        (Options(settings={"COL9.x": "1"}), "--set COL9"),
    ],
)
def test_an_unknown_name_is_refused_with_what_there_is(options: Options, sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        validate(options, all_checks())
    assert sentence in str(error.value)
