"""The parts of worker handling that need no process."""

from ddpdiag.runtime.page import StepPage
from ddpdiag.runtime.running import how_it_ended


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
