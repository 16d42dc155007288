"""Ranks in words."""

from hypothesis import given
from hypothesis import strategies as st
from seen import seen_of

from ddpdiag.checks.hosts import data_by_host, names_text, odd_text, ranks_text
from ddpdiag.checks.launch.variables import CHECK, Data
from ddpdiag.stats import find_odd_ranks


def test_runs_of_ranks_are_joined_and_what_is_left_out_is_counted_by_rank_and_not_by_range(golden):
    golden(*map(ranks_text, ([3], [7, 0, 1, 2], [*range(0, 40, 4), *range(100, 180)])))


@given(st.sets(st.integers(0, 500), min_size=1))
def test_every_rank_is_named_or_counted(ranks):
    spans, _, more = ranks_text(sorted(ranks)).partition(" ")[2].removesuffix(" more").partition(" and ")
    ends = [span.partition("-") for span in spans.split(",")]
    named = sum(int(last or first) - int(first) + 1 for first, _, last in ends)
    assert named + int(more or 0) == len(ranks)


def test_of_names_one_more_is_named(golden):
    golden(*(names_text([f"n{host}" for host in range(count)]) for count in (9, 10)))


@given(st.sets(st.integers(0, 20_000), min_size=1))
def test_many_ranks_stay_one_line(ranks):
    assert len(ranks_text(sorted(ranks))) < 140


def test_the_odd_value_comes_first_and_the_usual_one_last(golden):
    golden(odd_text(find_odd_ranks({0: "a", 1: "a", 2: "b", 3: None, 4: "a", 5: "a"}), missing="unset"))


def test_hosts_without_an_answer_are_left_out():
    seen = seen_of(CHECK, {2: Data({}, {})}, size=4)
    assert [(host.name, tuple(rows)) for host, rows in data_by_host(seen)] == [("n1", (2,))]
