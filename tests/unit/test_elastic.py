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


@pytest.mark.parametrize("name", [None, "", "gone/error.json", "pipe"])
def test_nothing_is_written_where_no_file_can_be(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    write_error_file({} if name is None else {ERROR_FILE: name and str(tmp_path / name)}, "x")
    assert os.listdir(tmp_path) == ["pipe"]
    assert not (tmp_path / "pipe").is_file()
