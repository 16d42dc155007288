"""Collectives of torch over NCCL, and DDP, with values that are known; started by torchrun on the CUDA stand-in."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
dist.init_process_group("nccl", device_id=device)
size = dist.get_world_size()


def full(count, value, dtype=torch.float32):
    return torch.full((count,), value, device=device, dtype=dtype)


def collectives():
    large = full(1000003, rank + 1.0)
    dist.all_reduce(large, async_op=True).wait()
    assert large.eq(size * (size + 1) / 2).all()
    for dtype in (torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.uint8):
        dist.all_reduce(summed := full(77, rank + 1, dtype))
        assert (summed == size * (size + 1) // 2).all(), dtype
    dist.all_reduce(mean := full(5, rank + 1.0), dist.ReduceOp.AVG)
    assert (mean == (size + 1) / 2).all()
    dist.all_reduce(most := full(5, rank + 1.0), dist.ReduceOp.MAX)
    assert (most == size).all()
    dist.broadcast(sent := full(3000000, float(rank)), size - 1)
    assert (sent == size - 1).all()
    dist.all_gather_into_tensor(gathered := full(size * 700001, 0.0), full(700001, float(rank)))
    assert (gathered.view(size, -1) == torch.arange(size, device=device)[:, None]).all()
    parts = torch.arange(size, device=device).repeat_interleave(700001).float()
    dist.reduce_scatter_tensor(part := full(700001, 0.0), parts)
    assert (part == rank * size).all()
    own = torch.arange(size * 4, device=device) + 100 * rank
    dist.all_to_all_single(others := torch.empty_like(own), own)
    assert (others.view(size, 4)[:, 0] == torch.arange(size, device=device) * 100 + rank * 4).all()


def messages():
    dist.barrier()
    if rank == 0:
        dist.send(full(900000, 7.0), 1)
    if rank == 1:
        dist.recv(received := full(900000, 0.0), 0)
        assert (received == 7).all()
    came = full(300000, -1.0)
    to_next = dist.P2POp(dist.isend, full(300000, float(rank)), (rank + 1) % size)
    for work in dist.batch_isend_irecv([to_next, dist.P2POp(dist.irecv, came, (rank - 1) % size)]):
        work.wait()
    assert (came == (rank - 1) % size).all()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert [own["rank"] for own in objects] == list(range(size))
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(both := full(3, 1.0), group=pair)
        assert (both == 2).all()


def training():
    torch.manual_seed(0)
    layers = (torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten())
    model = torch.nn.Sequential(*layers, torch.nn.Linear(8 * 26 * 26, 10)).to(device)
    model = DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(rank)
    images = torch.randn(32, 1, 28, 28)
    labels = images.mean((1, 2, 3)).mul(100).long().clamp(0, 9)
    for _ in range(5):
        loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    own = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    dist.broadcast(first := own.clone(), 0)
    assert torch.equal(own, first)


def counted():
    """Operators that the stand-in has in a quicker form."""
    ramp = torch.arange(3, 100003, dtype=torch.int32, device=device)
    assert torch.equal(ramp.cpu(), torch.arange(3, 100003, dtype=torch.int32))
    assert int((ramp > 50000).sum()) == 50002


collectives()
messages()
training()
counted()
if rank == 0:
    print(f"ok {size} ranks")
dist.destroy_process_group()
