"""torchrun's error file, in the form that torch.distributed.elastic.multiprocessing.errors reads."""

import json
import os
import time

from ddpdiag.probes.host.programs import ERROR_FILE, write_error_file


def test_the_sentence_is_where_torchrun_looks_for_it(tmp_path):
    path = tmp_path / "error.json"
    write_error_file({ERROR_FILE: str(path)}, "GPU 3 on h1 is lost.")
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "GPU 3 on h1 is lost."
    assert abs(int(message["extraInfo"]["timestamp"]) - time.time()) < 60


def test_torchrun_would_show_a_callstack_instead_of_the_sentence(tmp_path):
    write_error_file({ERROR_FILE: str(tmp_path / "error.json")}, "x")
    assert "py_callstack" not in (tmp_path / "error.json").read_text()


def test_an_older_file_is_replaced_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "error.json"
    path.write_text("old")
    write_error_file({ERROR_FILE: str(path)}, "new")
    assert "new" in path.read_text()
    assert os.listdir(tmp_path) == ["error.json"]


def test_without_torchrun_nothing_is_written():
    write_error_file({}, "x")
    write_error_file({ERROR_FILE: ""}, "x")


def test_a_directory_that_is_gone_is_no_error(tmp_path):
    write_error_file({ERROR_FILE: str(tmp_path / "gone" / "error.json")}, "x")


def test_a_device_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    write_error_file({ERROR_FILE: str(pipe)}, "x")
    assert not pipe.is_file()
    assert os.listdir(tmp_path) == ["pipe"]
