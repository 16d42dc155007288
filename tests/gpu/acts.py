"""What the field run does in processes of its own, each with real CUDA: `python acts.py ACT`, JSON on standard output.

fork-server   import what the fork server imports, look at this process, fork a child that uses the GPU
spin          a kernel that never ends; "ready" once it runs
load          work for the GPU until this process is ended; "ready" once it runs
look          GPU003's look at the GPUs
rank          one of two ranks that all-reduce until one is stopped; the other asks torch and NCCL what they know
"""

import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path

SILENT_SECONDS = 8.0
_CYCLES = 1 << 50


def ready() -> None:
    print("ready", flush=True)


def fork_server() -> None:
    from ddpdiag.probes.host.kernel import PROC, open_files
    from ddpdiag.runtime.supervisor.fork_server import LAZY_IMPORTS, import_torch

    import_torch()
    for module in LAZY_IMPORTS:
        importlib.import_module(module)
    import torch

    tasks = Path("/proc/self/task")
    seen = {
        "threads": [(task / "comm").read_text().strip() for task in tasks.iterdir()],
        "devices": [path for path in open_files(PROC / "self") if path.startswith(("/dev/nvidia", "/dev/dxg"))],
        "initialised": torch.cuda.is_initialized(),
        "bad_fork": torch.cuda._is_in_bad_fork(),
    }
    begin = time.monotonic()
    pid = os.fork()
    if pid == 0:
        assert float(torch.ones(2, device="cuda").sum()) == 2.0
        os._exit(0)
    child = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps(seen | {"child": str(child), "child_seconds": time.monotonic() - begin}))


def spin() -> None:
    import torch

    kept = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    try:
        torch.cuda._sleep(_CYCLES)
    except RuntimeError:  # the CUDA stand-in has no such kernel
        threading.Thread(target=_work, args=(kept.float(),), daemon=True).start()
    ready()
    time.sleep(600)


def load() -> None:
    import torch

    size = 2048
    left = torch.ones(size, size, device="cuda")
    ready()
    try:
        while True:
            left @ left
            torch.cuda.synchronize()
    except RuntimeError:  # nor cuBLAS
        _work(left)


def _work(tensor) -> None:
    while True:
        tensor.add_(1)


def look() -> None:
    from ddpdiag.codec import encode
    from ddpdiag.probes.gpu.health import read_gpus

    sys.stdout.buffer.write(encode(read_gpus(lambda step: None)))


def rank() -> None:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    last = [time.monotonic()]
    if dist.get_rank() == 0:
        threading.Thread(target=_tell_when_silent, args=(last,), daemon=True).start()
    tensor = torch.ones(1 << 20, device=device)
    for number in range(1 << 30):
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        last[0] = time.monotonic()
        if number == 10:
            ready()


def _tell_when_silent(last: list[float]) -> None:
    from ddpdiag.evidence.recorder import posted_collectives

    while time.monotonic() - last[0] < SILENT_SECONDS:
        time.sleep(0.1)
    traces = posted_collectives()
    told = {"traces": None if traces is None else [repr(own) for own in traces]}
    print(json.dumps(told), flush=True)
    os._exit(0)


ACTS = {"fork-server": fork_server, "spin": spin, "load": load, "look": look, "rank": rank}
if __name__ == "__main__":
    ACTS[sys.argv[1]]()
