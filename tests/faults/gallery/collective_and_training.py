"""Faults of ranks in collectives and in the training (COL, TRN, and RUN003: hung, died, raised)."""

import signal
from pathlib import Path

from cgroups import limit_memory
from fault import NOBODY, Blame, Fault
from launch import Bed, Launcher

import ddpdiag

DATA = Path(ddpdiag.__file__).parent / "data/mnist"


def damage_images(network):
    original = next(DATA.glob("train-images*"))
    damaged = bytearray(original.read_bytes())
    damaged[len(damaged) // 2 : len(damaged) // 2 + 64] = bytes(64)
    copy = network.folder / original.name
    copy.write_bytes(damaged)
    network[1].bind(copy, original)


FAULTS = {
    "values_corrupt": Fault(
        about="One rank contributes wrong values to every all-reduce (N2: P2P behind an IOMMU); no error is raised "
        "anywhere.",
        expect=("COL001.wrong",),
        blame=Blame(ranks={1}),
        inject="corrupt 1",
        options=("--stage", "collective"),
        deep=False,
    ),
    "values_received_corrupt": Fault(
        about="What one rank receives is wrong (a bad cable, memory errors): its own results differ, and no error is "
        "raised.",
        expect=("COL001.wrong",),
        blame=Blame(ranks={2}),
        inject="corrupt-received 2",
        options=("--stage", "launch,host,collective"),
    ),
    "rank_exits_without_a_word": Fault(
        about="A rank leaves with exit code 0 in the middle of a collective, as a script that calls sys.exit() too "
        "early.",
        expect=("RUN003.died",),
        blame=Blame(ranks={1}),
        inject="exit 1",
    ),
    "rank_killed_by_the_memory_limit": Fault(
        about="A rank takes more memory than the job's control group allows, and the kernel kills it (C2).",
        expect=("RUN003.died",),
        blame=Blame(ranks={1}),
        inject="memory 1",
        before=lambda network: limit_memory(network, network[1], 2 << 30),
        options=("--stage", "launch,host,rendezvous,collective", "--set", "COL001.deadline_seconds=40"),
    ),
    "rank_killed_in_the_middle": Fault(
        about="A rank's process is killed (SIGKILL) while the others wait for it in a collective.",
        expect=("RUN003.died",),
        blame=Blame(ranks={1}),
        inject="pause 1",
        when_reached=lambda network, running: running.in_fault(1).kill(signal.SIGKILL),
    ),
    "rank_segfaults": Fault(
        about='A rank crashes in its first all-reduce (G9): the others only see "Connection closed by peer".',
        expect=("RUN003.died",),
        blame=Blame(ranks={2}),
        inject="segv 2",
        bed=Bed(ranks=(2, 2)),
        options=("--stage", "launch,host,rendezvous,collective"),
    ),
    "import_of_torch_hangs": Fault(
        about="`import torch` never ends on one rank (a file server that does not answer, C1).",
        expect=("RUN003.hung",),
        blame=Blame(ranks={1}),
        inject="import 1",
        options=("--stage", "launch,host,rendezvous,collective"),
        budget=40,  # a hang in the first trial with torch costs all of it
    ),
    "rank_sleeps": Fault(
        about="A rank never enters the collective (it waits for a file server, a lock, a download); the others wait "
        "for it (D10).",
        expect=("RUN003.hung",),
        blame=Blame(ranks={3}),
        inject="sleep 3",
        bed=Bed(ranks=(2, 2)),
        options=("--stage", "collective", "--set", "COL001.deadline_seconds=6"),
    ),
    "rank_spins": Fault(
        about="A rank runs in a loop without end, where the others wait for it.",
        expect=("RUN003.hung",),
        blame=Blame(ranks={0}),
        inject="spin 0",
        bed=Bed(ranks=(3,), launcher=Launcher.ALONE),
        options=("--select", "LCH003,COL001", "--set", "COL001.deadline_seconds=6"),
    ),
    "rank_stopped": Fault(
        about="A rank's process is stopped (SIGSTOP: a debugger, a suspended job, G10); nobody's error text names it.",
        expect=("RUN003.hung",),
        blame=Blame(ranks={1}),
        inject="pause 1",
        when_reached=lambda network, running: running.in_fault(1).kill(signal.SIGSTOP),
        bed=Bed(ranks=(1, 2)),
        options=("--stage", "launch,host,rendezvous,collective", "--set", "COL001.deadline_seconds=6"),
    ),
    "rank_stuck_with_the_gil": Fault(
        about="A rank stands inside of C code and holds the GIL: no signal handler of Python and no watchdog thread "
        "runs in it.",
        expect=("RUN003.hung",),
        blame=Blame(ranks={1}),
        inject="gil 1",
        options=("--stage", "launch,host,rendezvous,collective", "--set", "COL001.deadline_seconds=6"),
        deep=False,
    ),
    "two_ranks_sleep": Fault(
        about="Two ranks of five, on different hosts, never enter the collective: both must be named.",
        expect=("RUN003.hung",),
        blame=Blame(ranks={1, 4}),
        inject="sleep 1,sleep 4",
        bed=Bed(ranks=(2, 2, 1), launcher=Launcher.ENV),
        options=("--select", "LCH003,COL001", "--set", "COL001.deadline_seconds=6"),
    ),
    "import_of_torch_fails": Fault(
        about="One host lacks a library that torch needs: its rank cannot even begin, and the others wait for it.",
        expect=("RUN003.raised", "RUN003.died"),
        blame=Blame(ranks={1}),
        inject="broken-import 1",
    ),
    "rank_raises": Fault(
        about="One rank raises an exception, the others wait for it in the collective (D4).",
        expect=("RUN003.raised",),
        blame=Blame(ranks={1}),
        inject="raise 1",
        bed=Bed(ranks=(2, 1)),
    ),
    "digits_corrupt_on_one_host": Fault(
        about="A damaged copy of the data on one host.",
        expect=("RUN003.raised",),
        blame=Blame(hosts={"h1"}),
        before=damage_images,
    ),
    "digits_missing_on_one_host": Fault(
        about="The data was not copied to one host (D9), which runs two ranks.",
        expect=("RUN003.raised",),
        blame=Blame(hosts={"h0"}),
        before=lambda network: network[0].mount_tmpfs(DATA, 1 << 20),
        bed=Bed(ranks=(2, 1), launcher=Launcher.ENV),
        options=("--stage", "training"),
    ),
    "parameters_drift": Fault(
        about="One rank's parameters drift away from the others' (a GPU that computes wrong, H9); the loss falls all "
        "the same.",
        expect=("TRN001.diverged",),
        blame=Blame(ranks={2}),
        inject="noise 2",
    ),
    "a_bit_flips_once": Fault(
        about="One product on one rank has one wrong bit, once: no error, and no other check notices (H9).",
        expect=("TRN004.differs",),
        blame=Blame(ranks={1}),
        inject="flip 1",
        options=("--soak", "60s", "--select", "TRN004"),
    ),
    "parameters_drift_among_two": Fault(
        about="Two ranks end with different parameters: nobody can say whose are right.",
        expect=("TRN001.diverged",),
        blame=NOBODY,
        inject="noise 1",
        bed=Bed(ranks=(1, 1), launcher=Launcher.ENV),
        options=("--stage", "training"),
        deep=False,
    ),
    "loss_is_not_a_number": Fault(
        about="One rank's loss becomes NaN; after the all-reduce of the gradients every rank has it.",
        expect=("TRN001.nan",),
        blame=Blame(ranks={1}),
        inject="nan 1",
    ),
}
