"""Recordings that may be shown to others. No GPU is needed for this."""

import json
from pathlib import Path

import pytest
from anonymise import anonymise

RECORDING = Path(__file__).parent.parent / "recordings" / "healthy-2-ranks.jsonl"


def changed(text, *nodes):
    arrivals = [json.dumps({"type": "arrival", "place": {"host": node}}) for node in nodes]
    return json.loads(list(anonymise([*arrivals, json.dumps({"text": text})]))[-1])["text"]


def test_hosts_are_numbered_wherever_they_stand():
    assert changed("gpu7 -> gpu70, on gpu7.", "gpu7", "gpu70") == "n0 -> n1, on n0."
    assert changed("my-gpu7 gpu71", "gpu7") == "my-gpu7 gpu71"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GPU-8a6e0c1f-1111-2222-3333-aabbccddeeff", "GPU-00000000-0000-0000-0000-000000000000"),
        ("cable of 0c:42:a1:00:00:ff", "cable of 02:00:00:00:00:00"),
        ("172.16.3.9:29500 and 172.16.3.9", "10.0.0.1:29500 and 10.0.0.1"),
        ("2001:db8::7", "fd00::1"),
    ],
)
def test_what_names_a_machine_is_changed(text, expected):
    assert changed(text) == expected


def test_what_names_none_stays():
    text = "127.0.0.1, ::1, 0.0.0.0, 0000:1b:00.0, 96.00.89.00.01, 580.95.05, 12:30:45, torch 2.13.0"
    assert changed(text) == text


def test_what_was_one_stays_one():
    a, b = "GPU-8a6e0c1f-1111-2222-3333-aabbccddeeff", "GPU-8a6e0c1f-1111-2222-3333-aabbccddee00"
    assert changed(f"{a} {b} {a}").split()[0] == changed(f"{a} {b} {a}").split()[2] != changed(f"{a} {b}").split()[1]


def test_a_whole_recording_stays_one():
    lines = RECORDING.read_text().splitlines()
    again = list(anonymise(lines))
    assert [json.loads(line)["type"] for line in again] == [json.loads(line)["type"] for line in lines]
    assert list(anonymise(again)) == again
