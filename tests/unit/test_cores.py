"""Tests of one run share the cores, or have them alone: whoever waits is not overtaken."""

import threading
import time

import pytest
from cores import cores, place


@pytest.fixture
def log(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", "a")
    return []


def holder(log: list[str], name: str, *, alone: bool, release: threading.Event) -> threading.Thread:
    def hold() -> None:
        with cores(alone=alone):
            log.append(name)
            release.wait(10)
            log.append(f"{name} ends")

    thread = threading.Thread(target=hold)
    thread.start()
    return thread


def wait_for(log: list[str], *names: str) -> None:
    end = time.monotonic() + 10
    while not set(names) <= set(log) and time.monotonic() < end:
        time.sleep(0.005)
    assert set(names) <= set(log)


def test_two_share_and_one_that_wants_them_alone_is_not_overtaken(log):
    first, second, go = threading.Event(), threading.Event(), threading.Event()
    go.set()
    threads = [holder(log, "a", alone=False, release=first), holder(log, "b", alone=False, release=second)]
    wait_for(log, "a", "b")
    threads.append(holder(log, "alone", alone=True, release=go))
    time.sleep(0.1)  # it waits for both, and holds the turn
    threads.append(holder(log, "late", alone=False, release=go))
    first.set()
    wait_for(log, "a ends")
    second.set()
    for thread in threads:
        thread.join(10)
    assert log[-4:] == ["alone", "alone ends", "late", "late ends"]


def test_without_workers_nothing_is_locked(log, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_TESTRUNUID")
    with cores(alone=True), cores(alone=True):
        assert not place("a").exists()
