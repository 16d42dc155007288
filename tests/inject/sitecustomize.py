"""Faults, injected from outside: Python imports this module at its start when its folder is on PYTHONPATH.

DDPDIAG_TEST_FAULT says "KIND RANK", several with commas; only processes with that RANK act on it, and what runs in them
knows nothing of it. Of ddpdiag's processes only fork servers and their workers import torch. A fork server may serve
several ranks: its workers change what they have when they get their RANK, and a rank with a fault in its import has a
variable that gives it a server of its own, where a launcher has set its RANK; RANK "*" is all of them. When a fault
begins, the file DDPDIAG_TEST_REACHED appears, with a line "RANK PID" for each process in which one began.

In the rank's first all-reduce:
    sleep, gil, spin          wait for ever, inside of C with the GIL, or in a loop
    segv, raise, exit         crash, raise an exception, leave without a word (exit code 0)
    memory                    take more and more memory
    tell                      write what the process reads of itself to DDPDIAG_TEST_REACHED.RANK, then go on
    pause                     wait two seconds, then go on: time for a fault from outside
In every all-reduce and broadcast:
    corrupt, corrupt-received what this rank sends, or what it receives, is off by one in the first element
    late                      this rank posts it 50 ms late (all-reduce only)
    longer                    this rank posts it with one element more
In training:
    noise                     the optimizer's step adds noise to the parameters
    nan                       the third loss is not a number
    gradient                  what this rank hands to DDP's all-reduce is off by one in the first element
    weights                   the first weights are drawn from another seed
    flip                      one bit of the hundredth product (torch.mm) is wrong
    skip                      the fifth large all-reduce is left out
    slow-data, slow-compute   the images come DDPDIAG_TEST_SLOW_SECONDS (0.03) later, or the loss takes so much more of
                              a core
    stall, break, crash       the optimizer's fifth step, where it belongs to a process group, never ends, raises, or
                              ends the process
    stuck                     the fifth step waits for ever in state D (uninterruptible): another process holds it there
In the import of torch:
    slower                    forward and backward take DDPDIAG_TEST_SLOWER (0.15) more of a core
    import, slow-import       it never ends, or takes DDPDIAG_TEST_IMPORT_SECONDS (5) longer
    broken-import             a library that it needs is not there
    cuda-thread               a thread starts that has the name of one of CUDA's

Of a whole host, by a variable of their own:
    DDPDIAG_TEST_TORCH        torch says that it has this version
    DDPDIAG_TEST_TORCH_GPUS   torch says that it has CUDA, and GPUs of these UUIDs (with commas): those that
                              CUDA_VISIBLE_DEVICES names, in that order; nothing can be computed on them
    DDPDIAG_TEST_RELAYED      worlds of more than so many ranks have one connection to rank 0 for each host
    DDPDIAG_TEST_GPUS         it has so many GPUs, which only copy; "COUNT hang SOURCE TARGET": that copy never ends,
                              "COUNT die SOURCE TARGET": its process ends, "COUNT wrong SOURCE TARGET": a word is wrong

And DDPDIAG_TEST_STANDIN registers another backend: see standin.py.
"""

import ctypes
import json
import os
import sys
import threading
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

_COLLECTIVES = "torch.distributed.distributed_c10d"
_MOST_BYTES = 8 << 30


def _forever():
    while True:
        time.sleep(1)


def _spin():
    while True:
        pass


def _hold_the_gil():
    # PyDLL keeps the GIL during a call. A second lock waits for ever, and goes on waiting after a signal, where sleep()
    # would return, and the interpreter would hand the GIL to a thread that asked for it.
    c, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(256)  # zeros: PTHREAD_MUTEX_INITIALIZER
    while True:
        c.pthread_mutex_lock(mutex)


def _stick():
    # As vfork() does: the parent waits until its child has called exec, and the child for the other end of a pipe.
    fifo = Path(os.environ["DDPDIAG_TEST_REACHED"]).with_suffix(".fifo")
    os.mkfifo(fifo)
    os.posix_spawn("/bin/true", ["true"], os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 9, fifo, os.O_RDONLY, 0)])


def _raise():
    raise RuntimeError("injected")


def _miss_a_library():
    raise ImportError("libtorch_cpu.so: cannot open shared object file: No such file or directory")


def _import_slowly():
    time.sleep(float(os.environ.get("DDPDIAG_TEST_IMPORT_SECONDS", "5")))


def _take_memory():
    taken = []
    while len(taken) < _MOST_BYTES >> 24:
        taken.append(b"x" * (1 << 24))
    _forever()


_IN_ALL_REDUCE = {
    "sleep": _forever,
    "spin": _spin,
    "gil": _hold_the_gil,
    "segv": lambda: ctypes.string_at(0),
    "raise": _raise,
    "exit": lambda: os._exit(0),
    "memory": _take_memory,
}


def _start_cuda_thread():
    def run():
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("cuda-EvtHandlr")
        _forever()

    threading.Thread(target=run, daemon=True).start()


_IN_IMPORT = {
    "import": _forever,
    "slow-import": _import_slowly,
    "broken-import": _miss_a_library,
    "cuda-thread": _start_cuda_thread,
}


def _announce():
    """Once for each process."""
    line = f"{os.environ.get('RANK')} {os.getpid()}\n"
    path = Path(os.environ["DDPDIAG_TEST_REACHED"])
    if not path.exists() or line not in path.read_text():
        with path.open("a") as reached:
            reached.write(line)


def _announced(act):
    def announce_and_act():
        _announce()
        act()

    return announce_and_act


class _Before(MetaPathFinder):
    """Acts before a module is looked for."""

    def __init__(self, module, act):
        self.module, self.act = module, act

    def find_spec(self, name, path=None, target=None):
        if name == self.module:
            self.act()


class _Changed(MetaPathFinder, Loader):
    """Changes a module when it has been loaded."""

    def __init__(self, module, change):
        self.module, self.change = module, change

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        # Another change of the same module comes after this one.
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]
        changes = [finder for finder in later if isinstance(finder, _Changed)]
        found = (finder.find_spec(name, path, target) for finder in (*changes, PathFinder))
        spec = next(filter(None, found))
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        self.loader.exec_module(module)
        self.change(module)


def _replaced_all_reduce(act):
    def change(module):
        module.all_reduce = lambda *_arguments, **_options: act()

    return change


def _pause(module):
    real, paused = module.all_reduce, []

    def all_reduce(*arguments, **options):
        if not paused:
            paused.append(True)
            _announce()
            time.sleep(2)
        return real(*arguments, **options)

    module.all_reduce = all_reduce


def _tell(module):
    real, path = module.all_reduce, Path("/proc/self")

    def all_reduce(*arguments, **options):
        import torch

        told = {
            "parent": os.getppid(),
            "cores": sorted(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
            "groups": (path / "cgroup").read_text(),
            "mounts": os.readlink(path / "ns/mnt"),
            "limits": (path / "limits").read_text(),
            "libraries": (path / "maps").read_text().count(os.environ.get("LD_PRELOAD") or "no library"),
            "folder": os.getcwd(),
            "output": os.readlink(path / "fd/1"),
            "variables": dict(os.environ),
        }
        Path(f"{os.environ['DDPDIAG_TEST_REACHED']}.{os.environ['RANK']}").write_text(json.dumps(told))
        return real(*arguments, **options)

    module.all_reduce = all_reduce


def _late(module):
    real = module.all_reduce

    def all_reduce(*arguments, **options):
        _announce()
        time.sleep(0.05)
        return real(*arguments, **options)

    module.all_reduce = all_reduce


def _spoil(tensor):
    _announce()
    if tensor.is_floating_point():
        tensor.view(-1)[0] += 1


def _corrupt(module):
    real_all_reduce, real_broadcast = module.all_reduce, module.broadcast

    def all_reduce(tensor, *arguments, **options):
        _spoil(tensor)
        return real_all_reduce(tensor, *arguments, **options)

    def broadcast(tensor, src=None, *arguments, **options):
        sent = tensor
        if src == module.get_rank():
            sent = tensor.clone()  # on the way: its own copy stays right
            _spoil(sent)
        return real_broadcast(sent, src, *arguments, **options)

    module.all_reduce, module.broadcast = all_reduce, broadcast


def _corrupt_received(module):
    real_all_reduce, real_broadcast = module.all_reduce, module.broadcast

    def all_reduce(tensor, *arguments, **options):
        work = real_all_reduce(tensor, *arguments, **options)
        if work is not None:
            work.wait()
        _spoil(tensor)
        return work

    def broadcast(tensor, src=None, *arguments, **options):
        work = real_broadcast(tensor, src, *arguments, **options)
        if src != module.get_rank():
            if work is not None:
                work.wait()
            _spoil(tensor)
        return work

    module.all_reduce, module.broadcast = all_reduce, broadcast


def _longer(module):
    real = module.all_reduce

    def all_reduce(tensor, *arguments, **options):
        _announce()
        return real(tensor.new_zeros(tensor.numel() + 1), *arguments, **options)

    module.all_reduce = all_reduce


def _noise(module):
    def add(optimizer, _arguments, _options):
        _announce()
        for group in optimizer.param_groups:
            group["params"][0].data.add_(1e-4)

    module.register_optimizer_step_post_hook(add)


def _weights(module):
    real = module.manual_seed

    def manual_seed(seed):
        _announce()
        return real(seed + 1)

    module.manual_seed = manual_seed
    # torch.compile's modules, if they are imported, put a function of their own in the place of torch's.
    if hasattr(sys.modules.get("torch"), "manual_seed"):
        sys.modules["torch"].manual_seed = manual_seed


def _in_fifth_step(act):
    def change(module):
        steps = []

        def count(_optimizer, _arguments, _options):
            distributed = sys.modules.get("torch.distributed")
            if distributed is not None and distributed.is_initialized():
                steps.append(True)
                if len(steps) == 5:
                    _announce()
                    act()

        module.register_optimizer_step_post_hook(count)

    return change


def _nan(module):
    real, calls = module.cross_entropy, []

    def cross_entropy(*arguments, **options):
        calls.append(True)
        loss = real(*arguments, **options)
        if len(calls) != 3:
            return loss
        _announce()
        return loss * float("nan")

    module.cross_entropy = cross_entropy


def _spoil_gradient(module):
    """One element of what goes into the all-reduce; what is computed without DDP stays right."""
    real = module.DistributedDataParallel.__init__

    def init(self, model, *arguments, **options):
        def spoil(gradient):
            _announce()
            spoilt = gradient.clone()
            spoilt.view(-1)[0] += 1
            return spoilt

        next(model.parameters()).register_hook(spoil)
        real(self, model, *arguments, **options)

    module.DistributedDataParallel.__init__ = init


def _skip(module):
    real, calls = module.all_reduce, []

    def all_reduce(tensor, *arguments, **options):
        calls.append(tensor.numel() > 1000)
        if sum(calls) == 5 and calls[-1]:
            _announce()
            return None
        return real(tensor, *arguments, **options)

    module.all_reduce = all_reduce


def _flip(module):
    real, calls = module.mm, []

    def mm(*arguments, **options):
        product = real(*arguments, **options)
        calls.append(True)
        if len(calls) == 100:
            _announce()
            words = product.view(module.int32).view(-1)
            words[len(words) // 2] ^= 1
        return product

    module.mm = mm


def _slow_seconds():
    return float(os.environ.get("DDPDIAG_TEST_SLOW_SECONDS", "0.03"))


def _slow_data(module):
    real = module.batch

    def batch(*arguments, **options):
        _announce()
        time.sleep(_slow_seconds())
        return real(*arguments, **options)

    module.batch = batch


def _slow_compute(module):
    real = module.cross_entropy

    def cross_entropy(*arguments, **options):
        _announce()
        end = time.perf_counter() + _slow_seconds()
        while time.perf_counter() < end:
            pass
        return real(*arguments, **options)

    module.cross_entropy = cross_entropy


def _slower(module):
    """Forward and backward take DDPDIAG_TEST_SLOWER (0.15) more of a core."""
    import torch

    share = float(os.environ.get("DDPDIAG_TEST_SLOWER", "0.15"))

    def prolonged(real):
        def call(*arguments, **options):
            _announce()
            begin = time.process_time()
            made = real(*arguments, **options)
            now = time.process_time()
            while time.process_time() < now + share * (now - begin):
                pass
            return made

        return call

    ddp = module.DistributedDataParallel
    ddp.forward = prolonged(ddp.forward)
    torch.Tensor.backward = prolonged(torch.Tensor.backward)


_CHANGES = {
    "gradient": ("torch.nn.parallel.distributed", _spoil_gradient),
    "skip": (_COLLECTIVES, _skip),
    "flip": ("torch", _flip),
    "slow-data": ("ddpdiag.workloads.proof", _slow_data),
    "slow-compute": ("torch.nn.functional", _slow_compute),
    "slower": ("torch.nn.parallel.distributed", _slower),
    "tell": (_COLLECTIVES, _tell),
    "pause": (_COLLECTIVES, _pause),
    "late": (_COLLECTIVES, _late),
    "corrupt": (_COLLECTIVES, _corrupt),
    "corrupt-received": (_COLLECTIVES, _corrupt_received),
    "longer": (_COLLECTIVES, _longer),
    "noise": ("torch.optim.optimizer", _noise),
    "nan": ("torch.nn.functional", _nan),
    "weights": ("torch.random", _weights),
    "stall": ("torch.optim.optimizer", _in_fifth_step(_forever)),
    "stuck": ("torch.optim.optimizer", _in_fifth_step(_stick)),
    "break": ("torch.optim.optimizer", _in_fifth_step(_raise)),
    "crash": ("torch.optim.optimizer", _in_fifth_step(lambda: ctypes.string_at(0))),
}


def _install(kind, rank):
    if kind in _IN_IMPORT:
        if rank in ("*", os.environ.get("RANK")):
            os.environ["DDPDIAG_TEST_IMPORTS"] = rank
            sys.meta_path.insert(0, _Before("torch", _announced(_IN_IMPORT[kind])))
        return
    module, change = _CHANGES.get(kind) or (_COLLECTIVES, _replaced_all_reduce(_announced(_IN_ALL_REDUCE[kind])))
    if any("fork_server" in word for word in sys.orig_argv):
        _LATER.append((rank, module, change))
    elif os.environ.get("RANK") == rank:
        sys.meta_path.insert(0, _Changed(module, change))


_LATER = []  # faults of workers, by rank


def _as_its_rank(module):
    """A worker of the fork server gets the faults of its rank when it begins to serve."""
    real = module.serve_trials

    def serve(*descriptors):
        for rank, *fault in _LATER:
            if rank in ("*", os.environ.get("RANK")):
                _change_now(*fault)
        real(*descriptors)

    module.serve_trials = serve


def _change_now(name, change):
    """Change a module, and what others have taken from it, if it is imported already."""
    if name not in sys.modules:
        sys.meta_path.insert(0, _Changed(name, change))
        return
    before = dict(vars(sys.modules[name]))
    change(sys.modules[name])
    after = vars(sys.modules[name])
    changed = {key: value for key, value in before.items() if after.get(key) is not value}
    for module in list(sys.modules.values()):
        for key, value in changed.items():
            if getattr(module, "__dict__", {}).get(key) is value:
                setattr(module, key, after[key])


def _set_version(version):
    def change(module):
        module.__version__ = version

    sys.meta_path.insert(0, _Changed("torch", change))


def _shown(uuids):
    """Those of the UUIDs that CUDA_VISIBLE_DEVICES names, by their place or their beginning."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return uuids
    entries = [entry for entry in value.split(",") if entry]
    return [next(u for u in uuids if u.startswith(e)) if e.startswith("GPU-") else uuids[int(e)] for e in entries]


def _set_gpus(uuids):
    # By CUDA_VISIBLE_DEVICES when torch is asked, as CUDA does: a worker may be forked from another rank's import.
    def properties(index):
        return SimpleNamespace(name="NVIDIA H100 80GB HBM3", uuid=_shown(uuids)[index].removeprefix("GPU-"))

    def change(module):
        module.version.cuda = "12.8"
        module.cuda.current_device = lambda: 0
        module.cuda.device_count = lambda: len(_shown(uuids))
        module.cuda.get_device_properties = properties

    sys.meta_path.insert(0, _Changed("torch", change))


def _have_gpus(count, fault="", *ends):
    """In place of CUDA, for the copies between GPUs only."""

    def change(module):
        sys.path.insert(0, str(Path(__file__).parent.parent / "torch"))
        from cpu_devices import CpuDevices

        faults = {"hang": _forever, "die": lambda: os._exit(3)}
        way = tuple(map(int, ends))
        module.CudaDevices = lambda *_: CpuDevices(
            int(count),
            wrong={way: 1} if fault == "wrong" else {},
            hang={way} if fault in faults else set(),
            in_hang=faults.get(fault),
        )

    sys.meta_path.insert(0, _Changed("ddpdiag.workloads.copies", change))


def _share_connections(most_ranks):
    def change(module):
        module.MAX_DIRECT_RANKS = most_ranks

    sys.meta_path.insert(0, _Changed("ddpdiag.runtime.control.relay", change))


for words in filter(None, os.environ.get("DDPDIAG_TEST_FAULT", "").split(",")):
    _install(*words.split())
if _LATER:
    sys.meta_path.insert(0, _Changed("ddpdiag.runtime.supervisor.worker", _as_its_rank))
if "DDPDIAG_TEST_STANDIN" in os.environ:
    import standin

    sys.meta_path.insert(0, _Changed(_COLLECTIVES, standin.register))
if "DDPDIAG_TEST_TORCH" in os.environ:
    _set_version(os.environ["DDPDIAG_TEST_TORCH"])
if "DDPDIAG_TEST_TORCH_GPUS" in os.environ:
    _set_gpus(os.environ["DDPDIAG_TEST_TORCH_GPUS"].split(","))
if "DDPDIAG_TEST_RELAYED" in os.environ:
    _share_connections(int(os.environ["DDPDIAG_TEST_RELAYED"]))
if "DDPDIAG_TEST_GPUS" in os.environ:
    _have_gpus(*os.environ["DDPDIAG_TEST_GPUS"].split())
