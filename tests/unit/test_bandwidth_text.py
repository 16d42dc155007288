"""Numbers in sentences."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpdiag.text import rate_text, share_text, size_text, time_text, times_text


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
        (times_text(2.14), "2.1x"),
        (times_text(12.3), "12x"),
        (rate_text(float("inf")), "inf"),
    ],
)
def test_three_digits_and_a_unit_that_fits(text: str, expected: str) -> None:
    assert text == expected


@given(st.floats())
def test_any_number_has_a_text_in_ascii(value: float) -> None:
    for write in (rate_text, size_text, time_text, share_text, times_text):
        assert write(value).isascii()
