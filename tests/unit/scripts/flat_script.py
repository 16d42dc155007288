"""All at the top of the file, with and without DDP, gradient accumulation, no Dataset; as small GPTs do it."""

import os
from contextlib import nullcontext

import numpy as np
import torch
from model import GPT
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

out_dir, init_from = "out", "scratch"
eval_interval, max_iters, gradient_accumulation_steps = 200, 1000, 40
device, backend = "cuda", "nccl"

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend=backend)
    ddp_rank = int(os.environ["RANK"])
    ddp_local_rank = int(os.environ["LOCAL_RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    device = f"cuda:{ddp_local_rank}"
    torch.cuda.set_device(device)
    master_process = ddp_rank == 0
    seed_offset = ddp_rank
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
else:
    master_process = True
    seed_offset = 0
if master_process:
    os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + seed_offset)
context = nullcontext() if device == "cpu" else torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16)


def get_batch(split):
    data = np.memmap(f"{split}.bin", dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - 128, (8,))
    x = torch.stack([torch.from_numpy(data[i : i + 128].astype(np.int64)) for i in starts])
    return x.to(device), x.roll(-1, 1).to(device)


if init_from == "scratch":
    model = GPT()
else:
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location=device)
    model = GPT()
    model.load_state_dict(checkpoint["model"])
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
model = torch.compile(model)
if ddp:
    model = DDP(model, device_ids=[ddp_local_rank])


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model(*get_batch("val"))[1].item() for _ in range(20)]
    model.train()
    return sum(losses) / len(losses)


raw_model = model.module if ddp else model
for number in range(max_iters):
    if number % eval_interval == 0 and master_process:
        print(estimate_loss())
        torch.save({"model": raw_model.state_dict()}, os.path.join(out_dir, "ckpt.pt"))
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with context:
            logits, loss = model(*get_batch("train"))
        (loss / gradient_accumulation_steps).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
if ddp:
    destroy_process_group()
