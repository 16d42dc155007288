"""torch's flight recorder, as it writes itself in JSON (trace version 2.10, torch 2.13)."""

import json
import socket
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from ddpdiag.evidence.recorder import MAX_COLLECTIVES, posted_collectives, why_unreadable
from ddpdiag.model import Collective
from ddpdiag.runtime.supervisor.hang_evidence import RecorderReader, ask_for_collectives, wait_for_answer
from ddpdiag.runtime.supervisor.ipc import PostedCollectives

C10D = "torch._C._distributed_c10d"


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
        return json.dumps({"version": "2.10", **({"entries": entries} if includeCollectives else {})}).encode()

    return dump


@pytest.fixture
def c10d(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch's module, with no recorder yet."""
    module = SimpleNamespace()
    monkeypatch.setitem(sys.modules, C10D, module)  # type: ignore[misc]
    return module


def test_without_torch_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, C10D, raising=False)
    assert posted_collectives() is None


def test_a_torch_without_recorder_says_nothing(c10d: SimpleNamespace) -> None:
    assert posted_collectives() is None


@pytest.mark.parametrize(
    ("entries", "since", "numbers"),
    [
        pytest.param((), 0.0, [], id="nothing was posted"),
        pytest.param((entry(1), entry(2)), 0.0, [1, 2], id="two recorders count once"),
        pytest.param([entry(seq) for seq in range(1, 21)], 0.0, range(21 - MAX_COLLECTIVES, 21), id="the last ones"),
        pytest.param((entry(9, at=2_000_000_000), entry(10, at=4_000_000_000)), 3.0, [10], id="since this trial"),
        pytest.param((entry(1), entry(2), entry(1, pg_id=1, at=3)), 0.0, [1], id="a group that was opened again"),
    ],
)
def test_the_last_entries_of_this_trial_are_kept(c10d: SimpleNamespace, entries, since: float, numbers) -> None:
    c10d._dump_fr_trace_json = c10d._dump_nccl_trace_json = recorder(*entries)
    assert posted_collectives(since) == tuple(
        Collective(seq=seq, name="gloo:all_reduce", elements=6, dtype="Float", group="0") for seq in numbers
    )


def test_sends_have_a_count_of_their_own(c10d: SimpleNamespace) -> None:
    c10d._dump_nccl_trace_json = recorder(entry(0, is_p2p=True, p2p_seq_id=4, profiling_name="nccl:send 0->1"))
    assert posted_collectives() == (
        Collective(seq=4, name="nccl:send 0->1", elements=6, dtype="Float", group="0", p2p=True),
    )


@pytest.mark.parametrize("trace", [b"", b"nonsense", b'{"entries": 3}', b'{"entries": [{"profiling_name": 1}]}'])
def test_a_trace_of_another_form_is_no_answer(c10d: SimpleNamespace, trace: bytes) -> None:
    c10d._dump_fr_trace_json = lambda **_options: trace
    assert posted_collectives() is None


class Group:
    """A process group whose backends call themselves so."""

    def __init__(self, *backends: str) -> None:
        self._device_types = list(range(len(backends)))
        self._backends = backends

    def _get_backend(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(name=lambda: self._backends[device])


def open_groups(monkeypatch: pytest.MonkeyPatch, **groups: Group) -> None:
    """Groups that are open, by what they were opened with; torch 2.15 has registered these backends."""
    backend = SimpleNamespace(backend_list=["undefined", "gloo", "nccl", "xccl", "ucc", "mpi", "fake"])
    world = SimpleNamespace(pg_map={group: (name, None) for name, group in groups.items()})
    module = SimpleNamespace(_world=world, Backend=backend)
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", module)  # type: ignore[misc]
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.15.0"))  # type: ignore[misc]


def hooked(**by_backend: tuple[dict[str, object], ...]) -> Callable[..., bytes]:
    """The reader of torch 2.15: one recorder for each class, and a group is known from its opening on."""

    def dump(includeCollectives: bool = True, onlyActive: bool = False, backend: str = "gloo") -> bytes:
        trace = json.loads(recorder(*by_backend.get(backend, ()))(includeCollectives, onlyActive))
        config = {"0": {"name": "0"}} if backend in by_backend else {}
        return json.dumps({**trace, "pg_config": config}).encode()

    return dump


@pytest.mark.parametrize(
    ("opened", "backend"),
    [
        pytest.param({"nccl": Group("nccl2")}, "nccl2", id='torch 2.15 opens it for "nccl"'),
        pytest.param({"theirs": Group("gloo", "fast")}, "fast", id="a class of another maker"),
    ],
)
def test_a_class_is_read_by_the_name_that_it_gives_itself(
    c10d: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, opened: dict[str, Group], backend: str
) -> None:
    """The other readers stay empty."""
    open_groups(monkeypatch, **opened)
    entries = (entry(2, profiling_name=f"{backend}:all_reduce"),)
    c10d._dump_fr_trace_json, c10d._dump_nccl_trace_json = hooked(gloo=(), **{backend: entries}), recorder()
    assert posted_collectives() == (
        Collective(seq=2, name=f"{backend}:all_reduce", elements=6, dtype="Float", group="0"),
    )
    assert posted_collectives(1.0) == ()
    assert why_unreadable() == ""


def test_a_group_that_is_open_and_idle_posted_nothing(c10d: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    c10d._dump_fr_trace_json, c10d._dump_nccl_trace_json = hooked(nccl2=()), recorder()
    for group in (Group("nccl2"), Group("nccl"), Group("gloo")):
        open_groups(monkeypatch, any=group)
        assert (posted_collectives(), why_unreadable()) == ((), "")


@pytest.mark.parametrize("backend", ["ucc", "mpi"])
def test_a_class_that_torch_does_not_record_is_said_to_be_unreadable(
    c10d: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    open_groups(monkeypatch, any=Group(backend))
    c10d._dump_nccl_trace_json = recorder()
    for reader in (hooked(), recorder(entry(1))):  # with names of classes, as in torch 2.15, and without
        c10d._dump_fr_trace_json = reader
        assert posted_collectives(1.0) is None
        assert why_unreadable() == f"torch 2.15.0 keeps no record of what {backend} does"


def test_a_group_written_in_python_has_the_name_it_was_opened_with(
    c10d: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_groups(monkeypatch, mock=Group())
    c10d._dump_fr_trace_json = recorder()
    assert why_unreadable() == "torch 2.15.0 keeps no record of what mock does"


def test_gloo_before_torch_2_8_is_not_recorded(c10d: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    open_groups(monkeypatch, gloo=Group("gloo"))
    c10d._dump_nccl_trace_json = recorder()
    assert posted_collectives() is None
    assert why_unreadable()


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_a_recorder_that_is_switched_off_says_so(
    c10d: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    open_groups(monkeypatch, nccl=Group("nccl"))
    monkeypatch.setenv(name, "0")
    c10d._dump_nccl_trace_json = recorder()
    assert posted_collectives() is None
    assert why_unreadable() == f"{name}=0 turns torch's flight recorder off"


def test_the_reader_of_a_worker_answers_its_supervisor() -> None:
    supervisor, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with supervisor, worker:
        RecorderReader(worker).start_trial()
        ask_for_collectives(supervisor)
        answer = wait_for_answer(supervisor, time.monotonic() + 5, lambda: True)
        assert isinstance(answer, PostedCollectives)
        assert wait_for_answer(supervisor, time.monotonic() + 0.1, lambda: True) is None, "one question, one answer"
