"""What ranks run with, as the report has it."""

from msgspec import Raw, structs
from seen import seen_of, together

from ddpdiag.checks.launch import variables as lch002
from ddpdiag.checks.launch import versions as lch003
from ddpdiag.checks.launch.variables import MOST_RANKS, MOST_VALUES
from ddpdiag.judgement import judge
from ddpdiag.model.report import Value


def with_variables(variables, *, files=None):
    rows = {rank: lch002.Data(own, (files or {}).get(rank, {})) for rank, own in enumerate(variables)}
    return seen_of(lch002.CHECK, rows)


def with_versions(*versions):
    return seen_of(lch003.CHECK, {rank: lch003.Data(python="3.11", torch=torch) for rank, torch in enumerate(versions)})


def found(seen):
    checks = (lch003.CHECK, lch002.CHECK)
    return {setting.name: setting for check in checks for setting in check.report(seen.of(check)).settings}


def test_what_all_have_is_alike():
    settings = found(with_variables([{"NCCL_ALGO": "Ring"}] * 3))
    assert settings["NCCL_ALGO"].alike
    assert settings["NCCL_ALGO"].values == (Value(value="Ring", count=3, ranks=(0, 1, 2)),)


def test_the_usual_value_comes_first_and_who_lacks_it_is_told():
    setting = found(with_variables([{}, {"A": "1"}, {"A": "1"}, {"A": "2"}]))["A"]
    assert not setting.alike
    assert [(own.value, own.ranks) for own in setting.values] == [("1", (1, 2)), (None, (0,)), ("2", (3,))]


def test_what_tells_ranks_apart_on_purpose_is_left_out():
    assert found(with_variables([{"RANK": "0"}, {"RANK": "1"}])) == {}


def test_lines_of_files_have_their_path():
    files = {0: {"/etc/nccl.conf": {"NCCL_DEBUG": "INFO"}}}
    setting = found(with_variables([{}, {}], files=files))["/etc/nccl.conf: NCCL_DEBUG"]
    assert (setting.kind, setting.alike) == ("file", False)


def test_versions_that_nobody_has_are_left_out():
    settings = found(together(with_versions("2.13", "2.12"), with_variables([{}, {}])))
    assert set(settings) == {"torch", "python"}
    assert not settings["torch"].alike
    assert settings["python"].kind == "version"


def test_versions_come_first_and_what_cannot_be_read_is_left_out():
    run = together(with_variables([{"A": "1"}]), with_versions("2.13")).recording
    checks = (lch002.CHECK, lch003.CHECK)
    assert [setting.name for setting in judge(run, checks).settings] == ["torch", "python", "A"]
    broken = [structs.replace(o, data=Raw(b'{"variables": 3}')) for o in run.outcomes if o.code == "LCH002"]
    run = structs.replace(run, outcomes=(*broken, *(o for o in run.outcomes if o.code == "LCH003")))
    assert [setting.name for setting in judge(run, checks).settings] == ["torch", "python"]


def test_many_values_and_ranks_are_counted():
    different = found(with_variables([{"A": str(rank)} for rank in range(20)]))["A"]
    assert (len(different.values), different.more, different.alike) == (MOST_VALUES, 20 - MOST_VALUES, False)
    same = found(with_variables([{"A": "1"}] * 100))["A"]
    assert (same.values[0].count, same.values[0].ranks) == (100, tuple(range(MOST_RANKS)))
