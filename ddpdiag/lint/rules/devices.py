"""Rules on ranks and devices: which GPU a rank uses, and where the script gets the rank's numbers from."""

import ast
import re
from collections.abc import Iterator

from ddpdiag.lint import Hit, rule
from ddpdiag.lint.analysis import INT_KINDS, Analysis, Kind, is_bare_cuda, moved_object, name_or_code
from ddpdiag.lint.script import argument, is_constant, text_of, words_in
from ddpdiag.model import Severity

# The argument of each function that must be a number: its name, and its position if it can be passed by position.
_NUMBER_ARGUMENTS = {
    "torch.cuda.set_device": ("device", 0),
    "torch.cuda.device": ("device", 0),
    "torch.distributed.init_process_group": ("rank", None),
    "torch.utils.data.DistributedSampler": ("rank", 2),
    "torch.utils.data.distributed.DistributedSampler": ("rank", 2),
}


@rule("LNT001", Severity.ERROR)
def rank_as_text(script: Analysis) -> Iterator[Hit]:
    """RANK, LOCAL_RANK or WORLD_SIZE is used as text.

    What: environment variables are text. `os.environ["LOCAL_RANK"]` is "0", not 0.

    Why: a comparison such as `os.environ["RANK"] == 0` is never true, so no rank saves and no rank logs, without an
    error. Used as a device ("Invalid device string: '0'") or as a rank of a sampler or of init_process_group, the text
    fails at once.

        if os.environ["RANK"] == 0:          # never
        if int(os.environ["RANK"]) == 0:     # on rank 0

    Fix: int(os.environ["LOCAL_RANK"]).

    Source: https://docs.python.org/3/library/os.html#os.environ (keys and values are strings);
    https://docs.pytorch.org/docs/stable/elastic/run.html (the variables).
    """
    reported: set[ast.expr] = set()  # expressions that read variables; each is reported once
    for node in script.nodes:
        for used in _used_as_number(script, node):
            if not script.is_surely(used, *INT_KINDS):
                continue
            origin = next((each for each in script.origins(used) if each is not None), used)
            if origin not in reported:
                reported.add(origin)
                what = "this" if origin is used else f"{name_or_code(used)} in line {used.lineno}"
                outcome = "the call fails, because it expects a number"
                if isinstance(node, ast.Compare):
                    outcome = "the comparison is never true"
                message = f"an environment variable is text: with {what}, {outcome}"
                yield Hit(origin, message, "Write int(...) around it.")


def _used_as_number(script: Analysis, node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.Compare(left=left, ops=[_], comparators=[ast.Constant(value=int())]):
            yield left
        case ast.Compare(left=ast.Constant(value=int()), ops=[_], comparators=[right]):
            yield right
        case ast.keyword(arg="device_ids", value=ast.List(elts=devices)):
            yield from devices
        case ast.Call():
            name, position = _NUMBER_ARGUMENTS.get(script.callee_name(node), (None, None))
            if name is not None and (value := argument(node, name, position)) is not None:
                yield value


@rule("LNT002", Severity.WARNING)
def device_of_global_rank(script: Analysis) -> Iterator[Hit]:
    """A GPU is chosen by the global rank.

    What: `torch.cuda.set_device(rank)`, `f"cuda:{rank}"` or `device_ids=[rank]` with the rank in the whole job.

    Why: GPUs are numbered from 0 on every host, ranks are not. On the second of two hosts with eight GPUs each, rank 8
    asks for GPU 8: "CUDA error: invalid device ordinal". On one host it works. A number from mp.spawn counts the
    processes of this host and is correct; so is `rank % torch.cuda.device_count()`.

        torch.cuda.set_device(dist.get_rank())                  # one host
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))    # any number

    Fix: use the local rank. This is an error if the script mentions several hosts (an option --nnodes, a variable
    NODE_RANK), else a warning.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html (LOCAL_RANK, RANK);
    https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group.
    """
    for node in script.nodes:
        for device in _devices(script, node):
            if script.is_surely(device, Kind.RANK):
                yield Hit(
                    node if isinstance(node, (ast.Call, ast.JoinedStr)) else device,
                    f"the GPU is chosen by the global rank ({name_or_code(device)}): the second host has no GPU of "
                    "that number",
                    'Use the local rank: int(os.environ["LOCAL_RANK"]).',
                    script.several_hosts_severity,
                )


def _devices(script: Analysis, node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions in `node` that give the number of a GPU."""
    match node:
        case ast.keyword(arg="device_ids", value=ast.List(elts=devices)):
            yield from devices
        case ast.JoinedStr(values=[ast.Constant(value="cuda:"), ast.FormattedValue(value=device)]):
            yield device
        case ast.Call():
            name, value = script.callee_name(node), None
            if name in ("torch.cuda.set_device", "torch.cuda.device") or moved_object(node) is not None:
                value = argument(node, "device", 0)
            elif name == "torch.device" and text_of(argument(node, "type", 0)) == "cuda":
                value = argument(node, "index", 1)
            if value is not None and not isinstance(value, ast.JoinedStr):
                yield value


_GPU_CHOOSERS = {"set_device", "set_device_index", "device_index"}


@rule("LNT003", Severity.ERROR)
def one_gpu_for_all(script: Analysis) -> Iterator[Hit]:
    """All ranks of a host use GPU 0.

    What: the process group is opened over NCCL, tensors go to "cuda" without a number, and nothing chooses a GPU for a
    rank: no torch.cuda.set_device, no device_ids, no device_id, no "cuda:N", no CUDA_VISIBLE_DEVICES.

    Why: "cuda" is the current device, which is GPU 0 on every rank. NCCL then refuses ("Duplicate GPU detected"), or
    GPU 0 runs out of memory while the others idle.

    Fix: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the first use of a GPU.

    Source: https://docs.pytorch.org/docs/stable/distributed.html#which-backend-to-use (each process needs exclusive
    access to every GPU it uses); https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_device.html.
    """
    if _chooses_gpu(script) or not _uses_current_gpu(script):
        return
    for call in script.group_openings:
        if any(word == "nccl" or word.endswith(":nccl") for word in words_in(call)):
            fix = 'Call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the first use of a GPU.'
            yield Hit(call, "nothing chooses a GPU for each rank, so all ranks of a host use GPU 0", fix)


def _chooses_gpu(script: Analysis) -> bool:
    if script.read_attributes & _GPU_CHOOSERS or "CUDA_VISIBLE_DEVICES" in script.strings:
        return True
    for node in script.nodes:
        match node:
            case ast.keyword(arg="device_ids" | "device_id" | "output_device", value=value):
                if not is_constant(value, None):
                    return True
            case ast.Constant(value=str(text)) if text.startswith("cuda:"):
                return True
            case ast.Call() if _names_gpu(script, node):
                return True
    # A function from another file of the project may choose the GPU.
    known = ("torch", "os.", "nn.", "argparse", "parser")
    others = (call for call in script.calls if not script.callee_name(call).startswith(known))
    names = (script.last_name(call).lower() for call in others if not script.callees(call))
    return any("device" in name or "distributed" in name for name in names)


def _names_gpu(script: Analysis, call: ast.Call) -> bool:
    name = script.callee_name(call)
    if name in ("torch.device", "torch.cuda.device"):
        return len(call.args) > 1 or bool(call.args and not isinstance(call.args[0], (ast.Constant, ast.IfExp)))
    if isinstance(call.func, ast.Attribute) and call.func.attr == "cuda":
        return bool(call.args or call.keywords)
    return False


def _uses_current_gpu(script: Analysis) -> bool:
    """Whether the script puts any tensor or module on the current GPU."""
    for call in script.calls:
        device = argument(call, "device", 0)
        if isinstance(device, ast.IfExp):
            device = device.body
        if is_bare_cuda(call) or is_constant(device, "cuda"):
            return True
    return False


_SETUP_NAME = re.compile(r"dist|setup|set_up|init", re.IGNORECASE)


@rule("LNT004", Severity.ERROR)
def local_rank_option(script: Analysis) -> Iterator[Hit]:
    """The local rank is expected as an option that no launcher passes.

    What: argparse knows `--local_rank`, the script reads args.local_rank, and nothing reads the variable LOCAL_RANK.

    Why: torchrun passes no such option; the value stays at its default, and all ranks use one GPU. Since torch 2.0,
    torch.distributed.launch passes `--local-rank`, and argparse stops with "unrecognized arguments: --local-rank=0".
    With both spellings this is a note only (`--details`): torch.distributed.launch works, torchrun and srun do not.

        parser.add_argument("--local_rank", type=int)       # torch before 2.0
        local_rank = int(os.environ["LOCAL_RANK"])          # any launcher

    Fix: read LOCAL_RANK from the environment.

    Source: https://docs.pytorch.org/docs/stable/distributed.html#launch-utility ("Changed in version 2.0.0");
    https://docs.pytorch.org/docs/stable/elastic/run.html#transitioning-from-torch-distributed-launch-to-torchrun;
    https://github.com/huggingface/pytorch-image-models/issues/1724.
    """
    option = script.options.get("local_rank")
    if option is None or {"LOCAL_RANK", "SLURM_LOCALID"} & script.strings or not _is_read_but_not_set(script):
        return
    spellings, fix = {text_of(arg) for arg in option.args}, 'Read int(os.environ["LOCAL_RANK"]) instead.'
    if "--local-rank" not in spellings:
        message = (
            "torchrun passes no --local_rank, and torch.distributed.launch passes --local-rank since torch 2.0: "
            "the script stops, or all ranks use one GPU"
        )
        yield Hit(option, message, fix)
    elif "--local_rank" in spellings or len(spellings) == 1:
        message = "torchrun and srun pass no --local-rank; only torch.distributed.launch does, and it is deprecated"
        yield Hit(option, message, fix, Severity.NOTE)


def _is_read_but_not_set(script: Analysis) -> bool:
    """Whether args.local_rank is read and never set, neither by this file nor by a set-up function of another file."""
    uses = [node for node in script.nodes if isinstance(node, ast.Attribute) and node.attr == "local_rank"]
    namespaces = {node.value.id for node in uses if isinstance(node.value, ast.Name)} - {"self"}
    if not uses or script.process_starts or any(isinstance(node.ctx, ast.Store) for node in uses):
        return False
    # Calls such as init_distributed_mode(args).
    setups = (call for call in script.calls if _SETUP_NAME.search(script.last_name(call)) and not script.callees(call))
    return not any(isinstance(arg, ast.Name) and arg.id in namespaces for call in setups for arg in call.args)


RULES = (rank_as_text, device_of_global_rank, one_gpu_for_all, local_rank_option)
