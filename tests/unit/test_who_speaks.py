"""Which process of a run says how far it is: they share terminals and logs."""

import io
import sys

import pytest

from ddpdiag.cli.check import _display
from ddpdiag.cli.outputs import Outputs
from ddpdiag.model import Place
from ddpdiag.render.progress import Progress, SilentListener


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def spoken(
    place: Place, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, outputs: Outputs, *, is_whole_world: bool
):
    monkeypatch.setattr(sys, "stderr", stream)
    for name in ("CI", "TERM"):
        monkeypatch.delenv(name, raising=False)
    listener = _display(place, outputs, starts_all_ranks=is_whole_world)
    listener.close()
    return type(listener)


def place(rank: int, local_rank: int | None) -> Place:
    return Place(rank=rank, world_size=16, host="n0", launcher="hand", local_rank=local_rank)


@pytest.mark.parametrize(
    ("rank", "local_rank", "on_screen", "in_log"),
    [
        (0, 0, Progress, Progress),
        (0, None, Progress, Progress),
        (1, 1, SilentListener, Progress),  # in a log that all share, one rank says that it looks for rank 0
        (1, None, Progress, Progress),  # in a shell of its own
        (8, 0, Progress, SilentListener),  # the first rank of another host's torchrun
        (9, 1, SilentListener, SilentListener),
    ],
)
def test_one_rank_speaks_in_each_place(monkeypatch, rank, local_rank, on_screen, in_log):
    who = place(rank, local_rank)
    assert spoken(who, Screen(), monkeypatch, Outputs(), is_whole_world=False) is on_screen
    assert spoken(who, io.StringIO(), monkeypatch, Outputs(), is_whole_world=False) is in_log


def test_where_one_process_started_all_ranks_only_rank_0_speaks(monkeypatch):
    assert spoken(place(0, 0), io.StringIO(), monkeypatch, Outputs(), is_whole_world=True) is Progress
    assert spoken(place(1, 1), io.StringIO(), monkeypatch, Outputs(), is_whole_world=True) is SilentListener


def test_a_quiet_run_shows_no_progress(monkeypatch):
    for stream in (Screen(), io.StringIO()):
        assert spoken(place(0, 0), stream, monkeypatch, Outputs(quiet=True), is_whole_world=False) is SilentListener
