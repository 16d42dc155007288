"""What tests have to show at the end, also where workers of pytest-xdist ran them."""

import pytest
from shown import SHOWN

TITLES = ("gallery of faults",)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """A worker hands over what it has to show."""
    output = getattr(node, "workeroutput", {})
    node.config.stash.setdefault(SHOWN, {}).update({title: output[title] for title in TITLES if title in output})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Show it."""
    for title, lines in config.stash.get(SHOWN, {}).items():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)
