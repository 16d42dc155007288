"""When something was heard, and when it is time to look."""

import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ddpdiag.watch.command import Silence
from ddpdiag.watch.output import FileSink, OutputMonitor, RankFileSink, Relay
from ddpdiag.watch.peers import Peers, job_name


def test_a_silence_is_looked_at_once_and_then_ever_more_rarely():
    silence = Silence(10.0)
    looked = []
    for second in range(0, 100):
        if silence.is_due(float(second)):
            silence.count_look()
            looked.append(second)
    assert looked == [10, 20, 40, 80]
    assert silence.looks == 4


def test_after_a_sound_the_next_silence_is_a_new_one():
    silence = Silence(10.0)
    assert silence.is_due(10.0)
    silence.count_look()
    assert not silence.is_due(15.0)
    assert not silence.is_due(0.5)
    assert silence.is_due(11.0)
    silence.count_look()
    assert silence.looks == 1


def test_a_file_that_grows_or_comes_is_heard_once(tmp_path):
    sink = FileSink([str(tmp_path / "*.log")])
    assert sink.last_write() is None
    (tmp_path / "a.log").write_text("x")
    assert sink.last_write() is not None
    assert sink.last_write() is None
    (tmp_path / "a.log").write_text("xy")
    sink.ignore_own_writes()
    assert sink.last_write() is None, "that was ours"


def test_the_files_to_which_ranks_print_are_output(tmp_path):
    with (tmp_path / "[0].log").open("w") as log, (tmp_path / "other").open("w"):
        process = subprocess.Popen(["sleep", "60"], stdout=log, stderr=subprocess.DEVNULL)
    try:
        sink = RankFileSink(lambda: [process.pid])
        assert list(sink.names) == [log.name]
        assert sink.last_write() is None
        Path(log.name).write_text("step 1")
        assert sink.last_write() is not None
    finally:
        process.kill()
        process.wait()
    assert list(sink.tail()) == [b"step 1"], "and after the end of the rank"
    assert RankFileSink(lambda: [os.getpid()]).names == {}, "our own output has another sink"


def test_a_relay_passes_bytes_on_and_knows_a_reader_that_takes_none():
    reader, outer = os.pipe()
    relay = Relay(outer)
    inner = os.dup(relay.descriptor)
    relay.start()
    os.write(inner, b"a\x00\xff")
    assert os.read(reader, 10) == b"a\x00\xff"
    assert relay.last_write() is not None
    assert relay.blocked_seconds() < 5
    os.close(inner)
    assert _soon(lambda: not relay.is_copying(0.0))
    os.close(reader)
    os.close(outer)


def test_a_relay_waits_for_a_slow_reader_even_of_a_pipe_that_does_not_block():
    reader, outer = os.pipe()
    os.set_blocking(outer, False)
    relay = Relay(outer)
    inner = os.dup(relay.descriptor)
    relay.start()
    most = 1 << 17  # a pipe holds half of that
    os.write(inner, b"x" * (1 << 16))
    os.write(inner, b"x" * (1 << 16))
    os.close(inner)
    assert _soon(lambda: relay.is_copying(0.0))
    got = 0
    while got < most:
        got += len(os.read(reader, most))
    assert _soon(lambda: not relay.is_copying(0.0))
    os.close(reader)
    os.close(outer)


SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


def test_who_is_of_one_launch_meets_under_one_name():
    assert job_name({}) is None
    assert job_name(SLURM | {"SLURM_PROCID": "1"}) == job_name(SLURM | {"SLURM_PROCID": "2"})
    assert job_name(SLURM) != job_name(SLURM | {"SLURM_STEP_ID": "1"})
    by_hand = {"MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert job_name(by_hand | {"RANK": "0"}) == job_name(by_hand | {"RANK": "1"}) is not None
    assert job_name(by_hand) is None


def test_a_shell_of_salloc_is_no_launch():
    shell = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "4294967290", "PMIX_NAMESPACE": "slurm.pmix.7.4294967290"}
    assert job_name(shell) is None
    assert job_name(shell | {"OMPI_MCA_ess_base_jobid": "9"}) is not None


def test_the_lowest_rank_leads_until_it_ends():
    job = SLURM | {"SLURM_JOB_ID": str(os.getpid())}
    second, first, other = (
        Peers(job | more, pid)
        for more, pid in (({"SLURM_PROCID": "3"}, 7), ({"SLURM_PROCID": "2"}, 8), ({"MASTER_PORT": "1"}, 9))
    )
    assert [peer.command_pid for peer in second.all()] == [8, 7]
    assert (first.is_leader(), second.is_leader(), other.is_leader()) == (True, False, True), (
        "the other is of another training"
    )
    assert first.request_look()
    first.close()
    assert second.is_leader()
    second.close()
    other.close()


def _soon(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + 10
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


class HangingSink:
    """A file system that does not answer."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def last_write(self) -> float | None:
        self.answers.wait(30)
        return time.monotonic()

    def ignore_own_writes(self) -> None:
        self.answers.wait(30)


def test_an_ear_that_hangs_holds_up_neither_a_report_nor_the_other_ears(tmp_path):
    hangs, log = HangingSink(), FileSink([str(tmp_path / "*.log")])
    listener = OutputMonitor([hangs, log])
    begin = time.monotonic()
    with listener.ignore_writes():
        pass
    assert time.monotonic() - begin < 25  # and not the 30 s of the other sink

    def last_message_at() -> bool:
        with (tmp_path / "a.log").open("a") as file:  # again, until the other sink has forgotten what was ours
            file.write("x")
        return listener.last_write > begin

    assert _soon(last_message_at)
    hangs.answers.set()


def test_what_we_write_ourselves_is_not_heard(tmp_path):
    listener = OutputMonitor([FileSink([str(tmp_path / "*.log")])])
    with listener.ignore_writes():
        (tmp_path / "a.log").write_text("a report")
    last = listener.last_write
    time.sleep(1.0)
    assert listener.last_write == last
