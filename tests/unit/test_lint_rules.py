"""`ddpdiag lint`: every rule finds its planted fault and nothing else, and ordinary scripts are silent."""

from pathlib import Path

import pytest

from ddpdiag.lint.command import read_findings
from ddpdiag.lint.rules import all_rules
from ddpdiag.model import Severity

SCRIPTS = Path(__file__).parent / "scripts"
RECIPES = Path(__file__).parents[2] / "recipes"
ORDINARY = sorted([*SCRIPTS.glob("*.py"), *RECIPES.glob("train*.py")])

# Each fault is one change to a script without fault: code, script, what it replaces, by what.
T, S = "torchrun_script.py", "spawned_script.py"
PLANTED = [
    ("LNT001", T, 'local_rank = int(os.environ["LOCAL_RANK"])', 'local_rank = os.environ["LOCAL_RANK"]'),
    ("LNT001", T, "        if rank == 0:\n", '        if os.environ["RANK"] == 0:\n'),
    ("LNT001", T, 'rank = int(os.environ["RANK"])', 'rank = os.environ.get("RANK", "0")'),
    ("LNT002", T, "set_device(local_rank)", "set_device(rank)"),
    ("LNT002", T, 'torch.device("cuda", local_rank)', 'torch.device(f"cuda:{dist.get_rank()}")'),
    ("LNT002", T, "device_ids=[local_rank]", "device_ids=[rank]"),
    ("LNT005", T, "    args = read", '    os.environ["MASTER_ADDR"] = "127.0.0.1"\n    args = read'),
    ("LNT005", T, 'group("nccl")', 'group("nccl", init_method="tcp://localhost:29500", rank=rank)'),
    ("LNT006", S, "    mp.spawn(basic, args=(count,), nprocs=count)", "mp.spawn(basic, args=(2,), nprocs=2)"),
    ("LNT006", S, "mp.spawn(basic, args=", "mp.spawn(lambda rank, n: basic(rank, n), args="),
    ("LNT007", T, "return image.clone(), label", "return image.cuda(), label"),
    ("LNT007", T, "return image.clone(), label", 'return image.to("cuda"), label'),
    (
        "LNT007",
        S,
        "    run(basic, count)",
        '    torch.ones(1).cuda()\n    mp.set_start_method("fork")\n    run(basic, count)',
    ),
    ("LNT008", T, "sampler=sampler, num", "sampler=sampler, shuffle=True, num"),
    ("LNT010", T, "        sampler.set_epoch(epoch)\n", ""),
    ("LNT011", T, "shuffle=True, drop_last", "rank=local_rank, shuffle=True, drop_last"),
    ("LNT011", T, "shuffle=True, drop_last", "num_replicas=torch.cuda.device_count(), drop_last"),
    ("LNT011", T, "shuffle=True, drop_last", "seed=args.seed + rank, drop_last"),
    ("LNT012", T, ", generator=torch.Generator().manual_seed(0)", ""),
    ("LNT017", T, "cross_entropy(model(images)", "cross_entropy(model.module(images)"),
    ("LNT018", T, "        dist.barrier()\n    dist.destroy", "            dist.barrier()\n    dist.destroy"),
    ("LNT019", T, "evaluate(ddp_model.module,", "evaluate(ddp_model,"),
    ("LNT020", T, "        self.norm =", "        self.extra = nn.Linear(8, 8)\n        self.norm ="),
    ("LNT022", T, '            torch.save({"model"', '        torch.save({"model"'),
    ("LNT023", T, ', map_location="cpu"', ""),
]
# Faults that need more than one change, and changes that are no fault (None).
INLINE = "for images, _ in train_loader:\n            {}(images).sum().backward()"
LOOP = "train_one_epoch({}, train_loader, optimizer, device)"
SYNCED = "nn.SyncBatchNorm.convert_sync_batchnorm(Net()).to(device)"
WRAPPED = "DDP(model, device_ids=[local_rank])"
GENERATOR = ", generator=torch.Generator().manual_seed(0)"
SEVERAL = {
    "an option for the local rank": (
        "LNT004",
        ('local_rank = int(os.environ["LOCAL_RANK"])', "local_rank = args.local_rank"),
        ('parser.add_argument("--resume")', 'parser.add_argument("--local_rank", type=int)\n    args = 0'),
    ),
    "a collective in a function that leaves": (
        "LNT018",
        ("        dist.barrier()\n    dist.destroy", "        save(rank)\n    dist.destroy"),
        (
            "def read_arguments",
            "def save(rank):\n    if rank > 0:\n        return\n    dist.all_reduce(torch.zeros(1))\n\n\n"
            "def read_arguments",
        ),
    ),
    "all ranks download": (
        "LNT013",
        ("    if local_rank == 0:\n        datasets.MNIST(root, download=True)\n    dist.barrier()\n", ""),
        ("MNIST(root, tr", "MNIST(root, download=True, tr"),
    ),
    "wrapped, then moved": ("LNT016", (SYNCED, "Net()"), (WRAPPED, "DDP(Net()).to(device)")),
    "wrapped and not moved": ("LNT016", (SYNCED, "Net()"), (WRAPPED, "DDP(Net(), device_ids=[local_rank])")),
    "moved by the wrapper": ("LNT016", (SYNCED, "Net()"), (WRAPPED, "DDP(Net())\n    ddp_model.cuda()")),
    "moved again": (None, (WRAPPED, "DDP(model).to(device)")),
    "all ranks read all data": (
        "LNT009",
        ("sampler=sampler, num", "shuffle=True, num"),
        ("    sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)\n", ""),
        ("        sampler.set_epoch(epoch)\n", ""),
        ("from torch.utils.data.distributed import DistributedSampler\n", ""),
        (f"    return random_split(whole, [50_000, 10_000]{GENERATOR})", "    return whole, whole"),
    ),
    "all ranks use one GPU": (
        "LNT003",
        ("    torch.cuda.set_device(local_rank)\n", ""),
        ('torch.device("cuda", local_rank)', 'torch.device("cuda")'),
        (", device_ids=[local_rank]", ""),
        ("images.to(device, non_blocking=True)", 'images.to("cuda")'),
    ),
    "the bare model is trained": ("LNT017", (LOOP.format("ddp_model"), INLINE.format("model"))),
    "wrapped and moved in one line": (
        None,
        (f"ddp_model = {WRAPPED}", "model = DDP(model).to(device)"),
        ("ddp_model", "model"),
        (LOOP.format("model"), INLINE.format("model")),
    ),
    "the module behind isinstance": (
        "LNT017",
        ("    model.train()\n", "    inner = model.module if isinstance(model, DDP) else model\n"),
        ("cross_entropy(model(images)", "cross_entropy(inner(images)"),
    ),
}
HINTS = [
    ("LNT021", "nn.SyncBatchNorm.convert_sync_batchnorm(Net())", "Net()"),
    ("LNT024", "    dist.destroy_process_group()\n", ""),
    ("LNT025", "lr=0.1 * dist.get_world_size()", "lr=0.1"),
]


def changed(script: str, old: str, new: str) -> str:
    text = (SCRIPTS / script).read_text()
    assert text.count(old) == 1, (script, old, text.count(old))
    return text.replace(old, new)


def codes(text: str, *, hints: bool = False) -> set[str]:
    _, findings = read_findings(text.encode(), "script.py")
    return {finding.code for finding in findings if hints or finding.severity is not Severity.NOTE}


@pytest.mark.parametrize("path", ORDINARY, ids=lambda path: path.stem)
def test_an_ordinary_script_is_silent(path):
    script, findings = read_findings(path.read_bytes(), path.name)
    assert script.not_judged is None
    assert [finding for finding in findings if finding.severity is not Severity.NOTE] == []


@pytest.mark.parametrize(("code", "script", "old", "new"), PLANTED, ids=lambda value: value[:24])
def test_a_planted_fault_is_found_and_nothing_else(code, script, old, new):
    assert codes(changed(script, old, new)) == {code}


@pytest.mark.parametrize(("code", "changes"), [(code, rest) for code, *rest in SEVERAL.values()], ids=SEVERAL)
def test_several_changes_are_one_fault_or_none(code, changes):
    text = (SCRIPTS / T).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    assert codes(text) == ({code} if code else set())


def test_shards_without_join_are_uneven():
    assert codes(changed("shards_with_join.py", "with model.join():", "if True:")) == {"LNT014"}


# How the model of a training loop that calls `model` may be wrapped, in place of two lines.
WRAPPINGS = [
    "ddp_model = DDP(model.cuda(local_rank))",
    "ddp_model = DDP(model.cuda(), device_ids=[local_rank])",
    "ddp_model = DDP(model.to(device))",
    "ddp_model = DDP(model.to(device, non_blocking=True).half())",
    "ddp_model = DDP(model.to(device).bfloat16().train())",
    "ddp_model = DDP(model.float().to(device))",
    "ddp_model = DDP(model.double())",
    "ddp_model = DDP(model.requires_grad_(True))",
    "ddp_model = DDP(torch.compile(model))",
    "ddp_model = DDP(torch.compile(model.cuda(), mode='default'))",
    "ddp_model = torch.compile(DDP(model.cuda()))",
    "ddp_model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(model))",
    "ddp_model = DDP(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).to(device))",
    "ddp_model = DDP(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model.cuda()).to(device))",
    "ddp_model = DDP(module=model.cuda(), device_ids=[local_rank])",
    "moved = model.cuda()\n    ddp_model = DDP(moved)",
    "moved = torch.compile(model.cuda())\n    ddp_model = DDP(moved, device_ids=[local_rank])",
    "synced = nn.SyncBatchNorm.convert_sync_batchnorm(model)\n    ddp_model = DDP(synced.to(device))",
    "ddp_model = nn.parallel.DistributedDataParallel(model.cuda())",
    "ddp_model = DDP(model.cuda()).train()",
]


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_wrapped_model_is_known_by_the_name_that_it_had_before(wrapping):
    text = changed(T, "ddp_model = DDP(model, device_ids=[local_rank])", wrapping)
    bare, wrapped = (text.replace(LOOP.format("ddp_model"), INLINE.format(name)) for name in ("model", "ddp_model"))
    assert codes(bare) == {"LNT017"}
    assert codes(wrapped) == set()


@pytest.mark.parametrize(("code", "old", "new"), HINTS, ids=lambda value: value[:12])
def test_a_hint_is_found_and_is_no_fault(code, old, new):
    text = changed(T, old, new)
    assert codes(text, hints=True) == {code}
    assert codes(text) == set()


def test_every_rule_is_tried():
    tried = {code for code, *_ in (*PLANTED, *HINTS, *SEVERAL.values())} | {"LNT014"}
    assert tried - {None} == {rule.code for rule in all_rules()}


GUARDS = [
    "if rank == 0:\n            ",
    "if local_rank == 0 and epoch % 2 == 0:\n            ",
    "if not rank:\n            ",
    "if utils.is_main_process():\n            ",
    "if is_master:\n            ",
    "if not dist.is_initialized() or dist.get_rank() == 0:\n            ",
    "if rank != 0:\n            continue\n        ",
]


@pytest.mark.parametrize("guard", GUARDS)
def test_a_save_on_one_rank_is_silent(guard):
    saved = '            torch.save({"model": ddp_model.module.state_dict()}, "last.pt")\n        dist.barrier()\n'
    text = changed(
        T, saved, f'        dist.barrier()\n        {guard}torch.save(ddp_model.module.state_dict(), "x.pt")\n'
    )
    assert codes(text.replace("    rank = int", "    is_master = os.environ['RANK'] == '0'\n    rank = int")) == set()


@pytest.mark.parametrize(
    ("guard", "expected"),
    [
        *((guard, {"LNT018"}) for guard in (*GUARDS[:3], GUARDS[6], "if dist.get_rank() == 0:\n            ")),
        (GUARDS[5], set()),
        ("if dist.is_initialized():\n            ", set()),
        ("if epoch == 0:\n            ", set()),
    ],
)
def test_a_barrier_on_some_ranks_is_found_and_one_on_all_is_silent(guard, expected):
    barrier = "        dist.barrier()\n    dist.destroy"
    assert codes(changed(T, barrier, f"        {guard}dist.barrier()\n    dist.destroy")) == expected


def test_a_batch_shared_out_among_the_ranks_needs_no_other_learning_rate():
    text = changed(T, "lr=0.1 * dist.get_world_size()", "lr=0.1")
    assert codes(text.replace("batch_size=64,", "batch_size=64 // dist.get_world_size(),"), hints=True) == set()
