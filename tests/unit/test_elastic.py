"""torchrun's error file, in the form that torch.distributed.elastic.multiprocessing.errors reads."""

import json
import os
import time

import pytest

from ddpdiag.probes.host.programs import ERROR_FILE, write_error_file


def test_the_sentence_is_where_torchrun_looks_for_it_in_place_of_an_older_file(tmp_path):
    path = tmp_path / "error.json"
    path.write_text("old")
    write_error_file({ERROR_FILE: str(path)}, "GPU 3 on h1 is lost.")
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "GPU 3 on h1 is lost."
    assert abs(int(message["extraInfo"]["timestamp"]) - time.time()) < 60
    # torchrun would show a call stack instead of the sentence.
    assert "py_callstack" not in path.read_text()
    assert os.listdir(tmp_path) == ["error.json"]


RECORDED = {"message": "ValueError: x", "errorCode": 7, "extraInfo": {"py_callstack": "Traceback", "timestamp": "5"}}


@pytest.mark.parametrize(
    ("earlier", "message"),
    [
        (RECORDED, RECORDED | {"message": "Start here.\nValueError: x"}),
        ("ValueError: x", {"message": "Start here.\nValueError: x"}),
        ({}, {"message": "Start here."}),
        (None, {"message": "Start here."}),
    ],
)
def test_the_error_of_a_rank_stays_below_the_sentence(tmp_path, earlier, message):
    path = tmp_path / "error.json"
    path.write_text("no error" if earlier is None else json.dumps({"message": earlier}))
    write_error_file({ERROR_FILE: str(path)}, "Start here.", keep=True)
    written = json.loads(path.read_text())["message"]
    assert written.items() >= message.items()
    assert "timestamp" in written["extraInfo"]


def test_a_file_that_cannot_be_replaced_is_written_in_place(tmp_path, monkeypatch):
    path = tmp_path / "termination-log"
    path.touch()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(16, "Device or resource busy")))
    write_error_file({ERROR_FILE: str(path)}, "GPU 3 on h1 is lost.")
    assert json.loads(path.read_text())["message"]["message"] == "GPU 3 on h1 is lost."
    assert os.listdir(tmp_path) == ["termination-log"]


@pytest.mark.parametrize("name", [None, "", "gone/error.json", "pipe"])
def test_nothing_is_written_where_no_file_can_be(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    write_error_file({} if name is None else {ERROR_FILE: name and str(tmp_path / name)}, "x")
    assert os.listdir(tmp_path) == ["pipe"]
    assert not (tmp_path / "pipe").is_file()
