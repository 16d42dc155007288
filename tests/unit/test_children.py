"""The parts of worker handling that need no process."""

from hypothesis import given
from hypothesis import strategies as st

from ddpdiag.runtime.children import main_thread
from ddpdiag.runtime.page import StepPage
from ddpdiag.runtime.running import how_it_ended

DUMP = """Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007f2 (most recent call first):
  File "/home/me/my code/train.py", line 12 in all_reduce
  File "/home/me/my code/train.py", line 40 in <module>
"""


def test_the_main_thread_is_the_last_one_of_a_dump() -> None:
    assert main_thread(DUMP) == ("all_reduce (train.py:12)", "<module> (train.py:40)")


@given(st.text())
def test_any_text_is_a_dump_of_something(text: str) -> None:
    assert isinstance(main_thread(text), tuple)


def test_a_step_page_is_read_as_it_was_written() -> None:
    page = StepPage.create()
    assert page.read() == (0, "")
    page.write(7, "all_reduce 4 B: wait")
    page.write(8, "ü" * 200)
    step, label = page.read()
    assert step == 8
    assert label.startswith("üüü")
    page.close()


def test_exit_codes_are_put_in_words() -> None:
    assert how_it_ended(-11) == "killed by SIGSEGV"
    assert how_it_ended(3) == "left with exit code 3 before it answered"
    assert "vanished" in how_it_ended(None)
    assert how_it_ended(-63).startswith("killed by")
