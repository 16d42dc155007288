"""A stand-in for NCCL on machines without GPUs: the backend `standin`, which wraps gloo and fails as it is told.

sitecustomize imports this module where DDPDIAG_TEST_STANDIN is set; the backend is registered once torch's collectives
have been loaded. What runs in ddpdiag knows nothing of it: `--backend standin` is one that a package declares to torch
(ddpdiag_test_standin.dist-info).

DDPDIAG_TEST_STANDIN is a JSON list of faults, each with

    kind      hang, crash, raise, wrong (the first element of every sum is off by one) or slow (each large call takes
              150 ms more); hang-init (creating the group never ends) or slow-init (it takes `seconds` more)
    unless    a list of sets of variables; the fault is not there when all of one set have these values
    where     variables with values (null: unset) that must all be so for the fault to be there
    pair      two ranks: only a group in which both are has the fault
    across    only a group of several hosts has it
    at        only the groups of these numbers have it, in the order in which they are opened from 0 (a file counts
              them: DDPDIAG_TEST_COUNT)

The sizes that count as large are those above 64 KiB.
"""

import json
import os
import signal
import socket
import sys
import time

_LARGE_BYTES = 64 << 10


def _is_set(variables):
    return all(os.environ.get(name) == value for name, value in variables.items())


def _is_there(fault, members, number):
    """Does this group have the fault? `members` are (rank, host)."""
    ranks = {rank for rank, _ in members}
    return (
        not any(_is_set(known) for known in fault.get("unless", []))
        and _is_set(fault.get("where", {}))
        and ranks.issuperset(fault.get("pair", []))
        and (not fault.get("across") or len({host for _, host in members}) > 1)
        and number in fault.get("at", [number])
    )


def _act(kind, own, first):
    """Before a sum: `own` says that this rank is one of those concerned, `first` that it is the first of them."""
    if kind == "hang" and own:
        time.sleep(10_000)
    if kind == "crash" and first:
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "raise" and own:
        raise RuntimeError("standin: unhandled system error (run with STANDIN_DEBUG=INFO for details)")


def _count(store, rank):
    """How many groups there were before this one, told by the first rank of each."""
    path = os.environ.get("DDPDIAG_TEST_COUNT")
    if rank == 0:
        with open(path or os.devnull, "a+") as counted:
            counted.seek(0)
            number = len(counted.read())
            counted.write(".")
        store.set("number", str(number))
    return int(store.get("number"))


def _make(dist):
    class StandIn(dist.ProcessGroup):
        """gloo, with the faults of the environment."""

        def __init__(self, store, rank, size, timeout):
            super().__init__(rank, size)
            self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
            store.set(f"member-{rank}", f"{os.environ['RANK']} {socket.gethostname()}")
            words = [store.get(f"member-{other}").decode().split() for other in range(size)]
            members = [(int(number), host) for number, host in words]
            number = _count(store, rank)
            self.own = members[rank][0]
            faults = json.loads(os.environ.get("DDPDIAG_TEST_STANDIN", "[]"))
            here = [fault for fault in faults if _is_there(fault, members, number)]
            self.faults = [(fault["kind"], sorted(fault.get("pair", [rank for rank, _ in members]))) for fault in here]
            self.calls = 0
            time.sleep(sum(fault.get("seconds", 10_000) for fault in here if fault["kind"].endswith("-init")))

        def getBackendName(self):
            return "standin"

        def allreduce(self, tensors, opts=None):
            large = sum(tensor.numel() * tensor.element_size() for tensor in tensors) > _LARGE_BYTES
            self.calls += 1
            # NCCL hangs after it has posted the first, which has the time of a first use.
            for kind, concerned in [own for own in self.faults if own[0] != "hang" or self.calls > 1]:
                _act(kind, self.own in concerned, self.own == concerned[0])
                if kind == "slow" and large:
                    time.sleep(0.15)
            work = self.gloo.allreduce(tensors, opts) if opts is not None else self.gloo.allreduce(tensors)
            if any(kind == "wrong" for kind, _ in self.faults) and large:
                work.wait()
                tensors[0].view(-1)[0] += 1
            return work

        def broadcast(self, tensors, opts):
            return self.gloo.broadcast(tensors, opts)

        def allgather(self, outputs, inputs, opts):
            return self.gloo.allgather(outputs, inputs, opts)

        def barrier(self, opts):
            return self.gloo.barrier(opts)

    return StandIn


def declared():
    """torch calls what its entry points name, at the end of its import; the backend is registered below."""


def register(module):
    """With what torch.distributed.distributed_c10d is, once it has been loaded."""
    dist = sys.modules["torch.distributed"]
    made = []

    def create(store, rank, size, timeout):
        if not made:
            made.append(_make(dist))  # torch.distributed has all its names only now
        return made[0](store, rank, size, timeout)

    module.Backend.register_backend("standin", create, devices=["cpu"])
