"""The parts of worker handling that need no process."""

from ddpdiag.runtime.supervisor.ipc import StepPage
from ddpdiag.runtime.supervisor.processes import how_it_ended


def test_a_step_page_is_read_as_it_was_written() -> None:
    page = StepPage.create()
    assert page.read() == (0, "")
    page.write(7, "all_reduce 4 B: wait")
    page.write(8, "ü" * 200)
    step, label = page.read()
    assert step == 8
    assert label.startswith("üüü")
    page.close()


def test_exit_codes_are_put_in_words(golden) -> None:
    golden(*(how_it_ended(code) for code in (-11, 3, None, -63)))
