"""What faulthandler writes, read back."""

from hypothesis import given
from hypothesis import strategies as st

from ddpdiag.runtime.supervisor import hang_evidence

DUMP = """Thread 0x00007f0 (most recent call first):
  File "/site/ddpdiag/runtime/supervisor/hang_evidence.py", line 48 in _serve
  File "/usr/lib/python3.11/threading.py", line 982 in run

Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007f2 (most recent call first):
  File "/home/me/my code/train.py", line 12 in all_reduce
  File "/home/me/my code/train.py", line 40 in <module>
"""


def thread(frames: int) -> str:
    lines = [f'  File "/a/deep.py", line {number} in f' for number in range(frames)]
    return "\n".join(["Thread 0x1 (most recent call first):", *lines, "  ...", ""])


def test_the_main_thread_is_the_last_one_of_a_dump() -> None:
    assert hang_evidence.read_stacks(DUMP).main == ("all_reduce (train.py:12)", "<module> (train.py:40)")


def test_other_threads_are_kept_but_for_the_recorder_reader() -> None:
    assert hang_evidence.read_stacks(DUMP).others == (("wait (threading.py:327)",),)


def test_a_deep_stack_says_how_much_was_left_out(golden) -> None:
    main = hang_evidence.read_stacks(thread(100)).main
    assert len(main) == hang_evidence.MAX_MAIN_FRAMES + 1
    golden(main[-1])
    assert hang_evidence.first_frames(("a", "b"), 2) == ("a", "b")


def test_a_bundle_stays_small_however_many_threads_there_are() -> None:
    stacks = hang_evidence.read_stacks(thread(100) * 200)
    assert len(stacks.others) == hang_evidence.MAX_THREADS
    assert {len(frames) for frames in stacks.others} == {hang_evidence.MAX_OTHER_FRAMES + 1}
    long = hang_evidence.read_stacks(thread(100).replace("deep", "d" * 4000) * 200)
    assert sum(len(frame) for frames in (long.main, *long.others) for frame in frames) < 60_000


def test_beyond_a_hundred_threads_the_main_one_is_not_in_the_dump() -> None:
    stacks = hang_evidence.read_stacks(f"{DUMP}\n...\n")
    assert stacks.main == ()
    assert stacks.others[-1] == ("all_reduce (train.py:12)", "<module> (train.py:40)")


@given(st.text())
def test_any_text_is_a_dump_of_something(text: str) -> None:
    assert isinstance(hang_evidence.read_stacks(text).main, tuple)
