"""torch's flight recorder, as it writes itself in JSON (trace version 2.10, torch 2.13)."""

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from ddpdiag.model import Collective
from ddpdiag.probes.collectives import LAST, groups, posted

C10D = "torch._C._distributed_c10d"
NONE: frozenset[tuple[str, str]] = frozenset()


def entry(seq: int, *, pg_id: int = 0, at: int | None = None, **more: object) -> dict[str, object]:
    return {
        "collective_seq_id": seq,
        "input_dtypes": ["Float"],
        "input_sizes": [[2, 3]],
        "is_p2p": False,
        "p2p_seq_id": 0,
        "pg_id": pg_id,
        "process_group": ["0", "default_pg"],
        "profiling_name": "gloo:all_reduce",
        "retired": True,
        "state": "scheduled",
        "time_created_ns": seq if at is None else at,
        **more,
    }


def recorder(*entries: dict[str, object]) -> Callable[..., bytes]:
    def dump(includeCollectives: bool = True, onlyActive: bool = False) -> bytes:
        status = {str(e["pg_id"]): {"last_enqueued_collective": "1"} for e in entries}
        shown = {"entries": entries} if includeCollectives else {}
        return json.dumps({"version": "2.10", "pg_status": status, **shown}).encode()

    return dump


@pytest.fixture
def c10d(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch's module, with no recorder yet."""
    module = SimpleNamespace()
    monkeypatch.setitem(sys.modules, C10D, module)  # type: ignore[misc]
    return module


def test_without_torch_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, C10D, raising=False)
    assert posted(NONE) is None
    assert groups() == frozenset()


def test_a_torch_without_recorder_says_nothing(c10d: SimpleNamespace) -> None:
    assert posted(NONE) is None


def test_an_empty_recorder_says_that_nothing_was_posted(c10d: SimpleNamespace) -> None:
    c10d._dump_fr_trace_json = recorder()
    assert posted(NONE) == ()


def test_the_last_entries_are_kept_with_their_elements(c10d: SimpleNamespace) -> None:
    c10d._dump_fr_trace_json = recorder(*(entry(seq) for seq in range(1, 21)))
    collectives = posted(NONE)
    assert collectives is not None
    assert [c.seq for c in collectives] == list(range(21 - LAST, 21))
    assert collectives[-1] == Collective(seq=20, name="gloo:all_reduce", elements=6, dtype="Float", group="0")


def test_what_earlier_trials_posted_is_left_out(c10d: SimpleNamespace) -> None:
    c10d._dump_fr_trace_json = recorder(entry(9))
    before = groups()
    c10d._dump_fr_trace_json = recorder(entry(9), entry(1, pg_id=1, at=10))
    collectives = posted(before)
    assert collectives is not None
    assert [c.seq for c in collectives] == [1]


def test_a_group_that_was_opened_again_counts_anew(c10d: SimpleNamespace) -> None:
    c10d._dump_fr_trace_json = recorder(entry(1), entry(2), entry(1, pg_id=1, at=3))
    collectives = posted(NONE)
    assert collectives is not None
    assert [c.seq for c in collectives] == [1]


def test_two_recorders_with_the_same_entries_count_once(c10d: SimpleNamespace) -> None:
    c10d._dump_fr_trace_json = c10d._dump_nccl_trace_json = recorder(entry(1), entry(2))
    collectives = posted(NONE)
    assert collectives is not None
    assert [c.seq for c in collectives] == [1, 2]


def test_sends_have_a_count_of_their_own(c10d: SimpleNamespace) -> None:
    c10d._dump_nccl_trace_json = recorder(entry(0, is_p2p=True, p2p_seq_id=4, profiling_name="nccl:send 0->1"))
    assert posted(NONE) == (Collective(seq=4, name="nccl:send 0->1", elements=6, dtype="Float", group="0", p2p=True),)


@pytest.mark.parametrize("trace", [b"", b"nonsense", b'{"entries": 3}', b'{"entries": [{"profiling_name": 1}]}'])
def test_a_trace_of_another_form_is_no_answer(c10d: SimpleNamespace, trace: bytes) -> None:
    c10d._dump_fr_trace_json = lambda **_options: trace
    assert posted(NONE) is None
