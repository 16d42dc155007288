"""Rules on processes, on process groups, and on the files that ranks share."""

import ast
from collections.abc import Iterator

from ddpdiag.lint import Hit, rule
from ddpdiag.lint.analysis import Analysis, is_bare_cuda
from ddpdiag.lint.script import (
    argument,
    attribute_path,
    calls_method,
    has_unpacking,
    is_constant,
    names_in,
    scope_nodes,
    text_of,
    words_in,
)
from ddpdiag.model import Severity

_LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")


@rule("LNT005", Severity.ERROR)
def loopback_master_addr(script: Analysis) -> Iterator[Hit]:
    """MASTER_ADDR is this host, in a script for several hosts.

    What: the script sets MASTER_ADDR to localhost or 127.0.0.1 and overrides the launcher's value, or opens the process
    group at tcp://127.0.0.1; and it mentions several hosts (an option --nnodes or --node-rank, a variable NODE_RANK).

    Why: every host then looks for rank 0 on itself. The first host waits for ranks that never join, the others for a
    store that does not exist there, until the time-out: "The client socket has timed out".

    Fix: leave MASTER_ADDR to the launcher, or os.environ.setdefault("MASTER_ADDR", "localhost").

    Source: https://docs.pytorch.org/docs/stable/distributed.html#environment-variable-initialization (address of rank
    0).
    """
    if not script.mentions_several_hosts:
        return
    for node in script.nodes:
        if _sets_loopback(script, node) and not any(script.conditions(node)):
            yield Hit(
                node,
                "every host looks for rank 0 on itself: a job on several hosts never starts",
                'Leave MASTER_ADDR to the launcher, or os.environ.setdefault("MASTER_ADDR", "localhost").',
            )


def _sets_loopback(script: Analysis, node: ast.AST) -> bool:
    match node:
        case ast.Assign(targets=[ast.Subscript(value=container, slice=key)], value=value):
            is_variable = text_of(key) == "MASTER_ADDR" and script.name(container) == "os.environ"
            return is_variable and text_of(value) in _LOOPBACK
        case ast.Call() if node in script.group_openings:
            address = text_of(argument(node, "init_method", 1)) or ""
            return address.startswith(tuple(f"tcp://{host}" for host in _LOOPBACK))
    return False


_SPAWN_FUNCTIONS = ("torch.multiprocessing.spawn", "torch.multiprocessing.spawn.spawn")


@rule("LNT006", Severity.ERROR)
def spawn_at_import(script: Analysis) -> Iterator[Hit]:
    """Processes are spawned when the script is imported.

    What: mp.spawn is called at the top of the script, outside of `if __name__ == "__main__":`, or gets a lambda or a
    function that is defined within another function.

    Why: a spawned process imports the script again to find its function, and would spawn again: "An attempt has been
    made to start a new process before the current process has finished its bootstrapping phase". A lambda or an inner
    function cannot be found by name: "Can't pickle <function <lambda>>".

    Fix: move the call into `if __name__ == "__main__":`, and the function to the top of the file.

    Source: https://docs.python.org/3/library/multiprocessing.html#the-spawn-and-forkserver-start-methods (safe
    importing of main module); https://docs.pytorch.org/docs/stable/multiprocessing.html#spawning-subprocesses.
    """
    for call in script.calls_of(*_SPAWN_FUNCTIONS):
        target = argument(call, "fn", 0)
        functions = script.functions.get(target.id, ()) if isinstance(target, ast.Name) else ()
        is_nested = bool(functions) and all(script.function_of(each) is not None for each in functions)
        if script.function_of(call) is None and not any(script.conditions(call)):
            message = "every spawned process imports this script, and would spawn again"
            yield Hit(call, message, 'Move the call into `if __name__ == "__main__":`.')
        elif target is not None and (is_nested or isinstance(target, ast.Lambda)):
            message = 'a spawned process cannot find this function by its name, and fails with "Can\'t pickle"'
            yield Hit(target, message, "Define the function at the top of the file.")


@rule("LNT007", Severity.ERROR)
def fork_after_cuda(script: Analysis) -> Iterator[Hit]:
    """CUDA is used in a forked process.

    What: a Dataset puts its items on a GPU in `__getitem__` while its DataLoader has workers, or the script requests
    the start method "fork" and uses a GPU before the processes are started.

    Why: a process that was forked from one that uses CUDA cannot use CUDA itself: "Cannot re-initialize CUDA in forked
    subprocess". DataLoader's workers are forked on Linux.

    Fix: return CPU tensors from the Dataset and move the batch in the loop (pin_memory=True, non_blocking=True); start
    processes with "spawn".

    Source: https://docs.pytorch.org/docs/stable/notes/multiprocessing.html#cuda-in-multiprocessing;
    https://docs.pytorch.org/docs/stable/data.html#multi-process-data-loading (not recommended to return CUDA tensors);
    https://github.com/pytorch/pytorch/issues/40403.
    """
    for function in script.functions.get("__getitem__", ()) if any(map(_forks_workers, script.loaders)) else ():
        owner = script.class_of(function)
        if owner is not None and any((attribute_path(base) or "").endswith("Dataset") for base in owner.bases):
            for call in filter(_uses_gpu, ast.walk(function)):
                yield Hit(
                    call,
                    "a DataLoader's workers are forked, and CUDA cannot be used in a forked process",
                    "Return CPU tensors from the Dataset, and move the batch in the training loop.",
                )
    yield from _fork_starts_after_cuda(script)


def _forks_workers(loader: ast.Call) -> bool:
    """Whether the DataLoader has worker processes that are forked, as by default."""
    workers = argument(loader, "num_workers", 5)
    is_spawned = text_of(argument(loader, "multiprocessing_context")) in ("spawn", "forkserver")
    return workers is not None and not is_constant(workers, 0) and not is_spawned and not has_unpacking(loader)


def _uses_gpu(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return is_bare_cuda(node) or (text_of(argument(node, "device", 0)) or "").startswith("cuda")


def _fork_starts_after_cuda(script: Analysis) -> Iterator[Hit]:
    """Find requests for the start method `fork` below a line that uses a GPU, in the same function or at top level."""
    for call in script.calls:
        name = script.last_name(call)
        method = argument(call, "start_method") or argument(call, "method", 0)
        if name not in ("set_start_method", "get_context", "start_processes") or text_of(method) != "fork":
            continue
        function = script.function_of(call)
        if any(
            _uses_gpu(each) and each.lineno < call.lineno and script.function_of(each) in (None, function)
            for each in script.calls
        ):
            yield Hit(
                call,
                "CUDA is used before these processes are forked, and cannot be used in a forked process",
                'Use the start method "spawn", or use no GPU before the fork.',
            )


_DATASET_LIBRARIES = ("torchvision.datasets.", "torchaudio.datasets.")


@rule("LNT013", Severity.WARNING)
def download_race(script: Analysis) -> Iterator[Hit]:
    """All ranks download the dataset at once.

    What: a dataset of torchvision or torchaudio with download=True on every rank, with one root directory, and no
    barrier around it.

    Why: the ranks write the same files. One rank reads another's half-written archive ("File not found or corrupted"),
    or unpacks the archive while another rank replaces it. This happens on the first run only, on a machine without the
    data.

        if local_rank == 0:
            MNIST(root, download=True)
        dist.barrier()
        data = MNIST(root)

    Fix: download before the job, or on one rank of each host, and let the others wait.

    Source: https://github.com/pytorch/examples/issues/1411; https://github.com/pytorch/tutorials/issues/3065.
    """
    for call in script.calls:
        is_dataset = script.callee_name(call).startswith(_DATASET_LIBRARIES)
        if not is_dataset or not is_constant(argument(call, "download"), True):
            continue
        root = argument(call, "root", 0)
        # The function calls a barrier, or a lock or a context such as local_main_process_first encloses the download.
        is_in_context = any(isinstance(outer, ast.With) for outer in script.ancestors(call))
        is_ordered = is_in_context or calls_method(script.scope_of(call), "barrier")
        if not is_ordered and (root is None or not script.may_differ_by_rank(root)) and script.runs_on_all_ranks(call):
            yield Hit(
                call,
                "all ranks download into one directory at once, and read each other's half-written files",
                "Download on local rank 0 only while the others wait at a barrier; or download before the job.",
            )


@rule("LNT022", Severity.WARNING)
def save_on_all_ranks(script: Analysis) -> Iterator[Hit]:
    """All ranks save to one file.

    What: torch.save writes to one path on every rank.

    Why: the ranks overwrite each other's data; if they differ in speed, or the file system is shared between hosts, the
    checkpoint is broken. The error appears when it is loaded: "PytorchStreamReader failed reading zip archive".

        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), path)
        dist.barrier()

    Fix: save on rank 0 only, or put the rank into the name.

    Source: https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html#save-and-load-checkpoints.
    """
    if not script.wrappings:
        return
    for call in script.calls_of("torch.save"):
        path = argument(call, "f", 1)
        # Whether the ranks' paths differ is unknown for a buffer, and for a path that a function returns.
        may_differ = path is None or isinstance(path, ast.Call) or script.may_differ_by_rank(path)
        if may_differ or has_unpacking(call) or not script.runs_on_all_ranks(call):
            continue
        message = "all ranks write to one file at once, and corrupt it"
        yield Hit(call, message, "Save on rank 0 only: if dist.get_rank() == 0.")


@rule("LNT023", Severity.WARNING)
def load_without_map_location(script: Analysis) -> Iterator[Hit]:
    """A checkpoint is loaded without map_location.

    What: on every rank, torch.load is called without map_location, and load_state_dict gets its result.

    Why: tensors are loaded to the GPU that they were saved from, which is GPU 0: every rank of the host puts a copy of
    the model (and of the optimizer's state) there. GPU 0 fails with "CUDA out of memory", while the others have free
    memory.

        state = torch.load(path, map_location="cpu")
        state = torch.load(path, map_location=f"cuda:{local_rank}")

    Weights with "pretrain" in their name are accepted: published files are usually saved from the CPU.

    Fix: map_location="cpu"; load_state_dict copies to where the model is.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.load.html (the note on GPU RAM surge);
    https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html#save-and-load-checkpoints.
    """
    uses_gpus = bool({"nccl", "cuda"} & script.strings) or any(
        script.callee_name(call).startswith("torch.cuda.") or is_bare_cuda(call) for call in script.calls
    )
    if not script.wrappings or not uses_gpus:
        return
    for call in script.calls_of("torch.load"):
        if argument(call, "map_location", 1) is not None or has_unpacking(call):
            continue
        # Published weights are usually saved from the CPU.
        parts = [origin for arg in call.args for origin in (arg, *script.origins(arg)) if origin is not None]
        if any("pretrain" in word.lower() for part in parts for word in words_in(part)):
            continue
        if _is_loaded_as_state(script, call) and script.runs_on_all_ranks(call):
            message = "every rank loads the tensors to the GPU that they were saved from: GPU 0 runs out of memory"
            yield Hit(call, message, 'Pass map_location="cpu".')


def _is_loaded_as_state(script: Analysis, call: ast.Call) -> bool:
    """Whether the result of `call` is passed to load_state_dict, directly or through a variable of the function."""
    statement = script.statement_of(call)
    names = {attribute_path(target) for target in statement.targets} if isinstance(statement, ast.Assign) else set()
    for node in scope_nodes(script.scope_of(call)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load_state_dict":
            inner = [each for arg in node.args for each in ast.walk(arg)]
            if call in inner or any(attribute_path(each) in names - {None} for each in inner):
                return True
    return False


@rule("LNT024", Severity.NOTE)
def no_destroy(script: Analysis) -> Iterator[Hit]:
    """The process group is never destroyed.

    What: the script opens a process group and does not call destroy_process_group. This is a note (`--details`).

    Why: with NCCL, a process that ends while others still communicate may leave them hanging, and torch warns at exit:
    "destroy_process_group() was not called before program exit, which can leak resources".

    Fix: dist.destroy_process_group() at the end, on every rank.

    Source: https://docs.pytorch.org/docs/stable/distributed.html#shutdown.
    """
    cleanup_names = {"destroy_process_group", "cleanup", "cleanup_distributed", "cleanup_ddp"}
    if script.group_openings and not cleanup_names & {*names_in(script.tree), *script.imports}:
        message = "the process group is never destroyed: torch warns, and ranks that end early may leave others hanging"
        yield Hit(script.group_openings[0], message, "Call dist.destroy_process_group() at the end.")


RULES = (
    loopback_master_addr,
    spawn_at_import,
    fork_after_cuda,
    download_race,
    save_on_all_ranks,
    load_without_map_location,
    no_destroy,
)
