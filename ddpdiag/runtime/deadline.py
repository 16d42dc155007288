"""The deadline of a trial on one rank: first fix what is known, then wake, dump and kill."""

import time

from msgspec import structs

from ddpdiag.model import Outcome
from ddpdiag.runtime.children import Nursery, Worker, is_busy
from ddpdiag.runtime.running import Running


def expired(
    running: Running, child: Worker | Nursery, *, at: str | None, told: bool, ends: bool, nccl: bool
) -> Outcome:
    """The outcome of a trial that did not end in time; takes up to 3.5 s.

    `child` is the process that holds the trial up, and is ended if `ends`. `at` says where it stands as long as there
    is no worker. `told`: rank 0 ended it because of somebody else. `nccl`: NCCL's own service is asked, too.
    """
    process = child.look()
    outcome = running.hung(process, time.monotonic(), at=at, told=told)
    if not told:
        since = None if at is not None else running.worker.page.seconds()
        process = structs.replace(process, busy=is_busy(process.pid), step_seconds=since)
    stacks, flight, ras = child.testify(process.state, nccl=nccl and not told)
    survived = ends and not child.end()
    process = structs.replace(process, stack=stacks.main, threads=stacks.others, survived=survived)
    return structs.replace(outcome, process=process, flight=flight, ras=ras)
