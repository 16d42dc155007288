"""Numbers for people."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpdiag import text as units
from ddpdiag.text import rate_text, share_of_expected_text, share_text, size_text, time_text, times_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0032, "3.2 ms"),
        (1.5, "1.5 s"),
        (0, "0 s"),
        (0.000181, "181 us"),
        (0.0009999, "1 ms"),
        (3e-10, "0.3 ns"),
        (3600, "3,600 s"),
        (-0.0032, "-3.2 ms"),
        (None, "–"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_times_step_by_a_thousand(value, text):
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.07e9, "1.07 GB/s"), (999.9e6, "1 GB/s"), (2.1e8, "210 MB/s"), (0, "0 B/s"), (0.5, "0.5 B/s"), (4e12, "4 TB/s")],
)
def test_a_gigabyte_per_second_is_a_thousand_million(value, text):
    assert units.bytes_per_s(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(64 << 20, "64 MiB"), (1023, "1,023 B"), (1024, "1 KiB"), (0, "0 B"), (1.5 * (1 << 30), "1.5 GiB")],
)
def test_sizes_step_by_1024(value, text):
    assert units.byte_count(value) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("busbw_bytes_per_s", 1.07e9, "1.07 GB/s"),
        ("bf16_flop_per_s", 7.02e14, "702 TFLOP/s"),
        ("samples_per_second", 2140, "2,140 /s"),
        ("free_bytes", 1 << 30, "1 GiB"),
        ("port", 29500, "29500"),
        ("ratio", 5.0984, "5.1"),
        ("healthy", True, "yes"),
        ("model", "H200", "H200"),
        ("came", [0, 1], "0, 1"),
        ("came", [], "none"),
        ("width", None, "–"),
        ("huge_seconds", 10**400, "inf"),
        ("training.seconds", 1.79, "1.79 s"),
        ("seconds.context", 4.06e-05, "40.6 us"),
        ("all_reduce.gloo.bytes", 4 << 20, "4 MiB"),
        ("training.accuracy", 0.1, "10 %"),
        ("coordinator.n0.example.com", "10.0.0.3", "10.0.0.3"),
        ("master_port.hosts", 3, "3"),
    ],
)
def test_the_end_of_a_name_is_its_unit(name, value, text):
    assert units.quantity(name, value) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("training.seconds", "training.time"),
        ("seconds.import", "time.import"),
        ("all_reduce.gloo.bytes", "all reduce.gloo.size"),
        ("all_reduce.gloo.busbw_bytes_per_s", "all reduce.gloo.busbw"),
        ("training.accuracy", "training.accuracy"),
        ("seconds.", "time."),
        (".", "."),
        ("busbw_bytes_per_s", "busbw"),
        ("time_to_first_step_seconds", "time to first step"),
        ("_seconds", "_seconds"),
        ("training.samples_per_second", "training.samples"),
        ("bytes_per_s", "rate"),
    ],
)
def test_a_label_leaves_the_unit_out_or_names_it_as_a_word(name, text):
    assert units.label(name) == text


def test_a_column_has_one_unit():
    unit = units.column_unit("busbw_bytes_per_s", [1.07e9, 2e6, None, math.nan])
    assert unit.symbol == "GB/s"
    assert [units.cell(value, unit) for value in (1.07e9, 2e6, math.nan)] == ["1.07", "0.00200", "nan"]


@given(st.floats(min_value=1e-8, max_value=1e15))
def test_what_is_shown_is_what_was_measured(value):
    number, symbol = units.bytes_per_s(value).split(" ")
    size = {"B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12}[symbol]
    assert float(number.replace(",", "")) * size == pytest.approx(value, rel=0.006)


@given(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.sampled_from(["x", "x_seconds", "x_bytes"])
)
def test_every_scalar_has_a_text(value, name):
    assert isinstance(units.quantity(name, value), str)
    assert isinstance(units.cell(value, units.column_unit(name, [value])), str)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (rate_text(1.3149e9), "1.31 GB/s"),
        (rate_text(9.8e9), "9.8 GB/s"),
        (rate_text(480.2e9), "480 GB/s"),
        (rate_text(999.9e9), "1 TB/s"),
        (rate_text(0.0), "0 B/s"),
        (size_text(64 << 20), "64 MiB"),
        (size_text(1536), "1.5 KiB"),
        (size_text(1023), "1023 B"),
        (size_text(8 << 30), "8 GiB"),
        (time_text(120e-6), "120 us"),
        (time_text(999.9e-6), "1 ms"),
        (time_text(0.0447), "44.7 ms"),
        (time_text(75.0), "75 s"),
        (share_text(0.906), "91 %"),
        (share_text(0.0036), "0.4 %"),
        (share_text(0.00004), "0.004 %"),
        (share_text(1e-9), "less than 0.001 %"),
        (share_text(0.0), "0 %"),
        (share_text(0.0097), "1 %"),
        (share_of_expected_text(1.28e9, 352e9), "0.4 % of 352 GB/s"),
        (share_of_expected_text(480e9, 420e9), "114 % of 420 GB/s"),
        (share_of_expected_text(480e9, 352e9), "more than the 352 GB/s expected"),
        (times_text(1.04), "1.04 times"),
        (times_text(2.14), "2.1 times"),
        (times_text(12.3), "12 times"),
        (rate_text(float("inf")), "inf"),
    ],
)
def test_three_digits_and_a_unit_that_fits(text: str, expected: str) -> None:
    assert text == expected


@given(st.floats())
def test_any_number_has_a_text_in_ascii(value: float) -> None:
    for write in (rate_text, size_text, time_text, share_text, times_text):
        assert write(value).isascii()
