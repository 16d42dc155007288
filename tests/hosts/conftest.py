"""Hosts for tests."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from network import Network
from required import require_hosts


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[[int], Network]]:
    """hosts(3): a network of three hosts, gone after the test."""
    require_hosts()
    with ExitStack() as networks:
        made: list[Network] = []

        def make(count: int) -> Network:
            made.append(networks.enter_context(Network(count, tmp_path / f"network-{len(made)}")))
            return made[-1]

        yield make
