"""How fast is our training, against the loop that tutorials have?

    python tests/benchmarks/epoch.py [--rounds 7] [--ranks 2]

Two ranks over gloo train one epoch of the digits that ship with ddpdiag, in turns: the classic loop (a Dataset that
makes a tensor of each image, a DataLoader, batches of 100 on each rank) and the loop of ddpdiag/workloads/training.py
(the same network, batch and optimizer; a batch is cut from one tensor). Shown are samples per second over both ranks,
round by round, and the median of the ratios. The bar: 1.2.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time

BATCH = 100


class Quiet:
    """A context that tells nobody."""

    def step(self, label):
        pass


def classic(digits, rank, ranks):
    """As in the tutorials: seconds and samples of one epoch on this rank."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Dataset
    from torch.utils.data.distributed import DistributedSampler

    from ddpdiag.workloads import training

    class Images(Dataset):
        def __len__(self):
            return len(digits.train_images)

        def __getitem__(self, number):
            image = torch.from_numpy(digits.train_images[number].numpy().copy()).float().div(255)
            image = (image - training.MEAN) / training.DEVIATION
            return image.unsqueeze(0), int(digits.train_labels[number])

    sampler = DistributedSampler(Images(), num_replicas=ranks, rank=rank)
    loader = DataLoader(Images(), batch_size=BATCH, sampler=sampler)
    torch.manual_seed(0)
    model = DistributedDataParallel(training.network())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    sampler.set_epoch(0)
    begin, samples = time.perf_counter(), 0
    for images, labels in loader:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        samples += len(images)
    return time.perf_counter() - begin, samples


def ours(digits, rank, ranks):
    """The same with ddpdiag's loop."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from ddpdiag.workloads import training

    steps = len(digits.train_images) // (BATCH * ranks)
    schedule = training.Schedule(steps=steps, global_batch=BATCH * ranks, learning_rate=1e-3)
    device = torch.device("cpu")
    model = DistributedDataParallel(training.seeded_network(schedule, device))
    indices = training.batches(len(digits.train_images), schedule, rank, ranks)
    begin = time.perf_counter()
    training.learn(Quiet(), model, digits, schedule, indices)
    return time.perf_counter() - begin, steps * BATCH


def work(rank, ranks, rounds, store, told):
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from ddpdiag.workloads import mnist

    torch.set_num_threads(1)
    digits = mnist.load()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for number in range(rounds + 1):  # the first one warms up
        pair = []
        for loop in (classic, ours) if number % 2 else (ours, classic):
            dist.barrier()
            pair.append((loop.__name__, *loop(digits, rank, ranks)))
        told.put((number, pair))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="pairs of epochs (default: 7)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks (default: 2)")
    asked = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=work, args=(rank, asked.ranks, asked.rounds, f"{folder}/store", told))
            for rank in range(asked.ranks)
        ]
        for process in processes:
            process.start()
        rows = [told.get(timeout=300) for _ in range(asked.ranks * (asked.rounds + 1))]
        for process in processes:
            process.join()
    print("| round | classic, samples/s | ours, samples/s | ratio |\n|--:|--:|--:|--:|")
    ratios = []
    for number in range(1, asked.rounds + 1):
        rates = {}
        for name in ("classic", "ours"):
            own = [
                (seconds, samples)
                for at, pair in rows
                if at == number
                for kind, seconds, samples in pair
                if kind == name
            ]
            rates[name] = sum(samples for _, samples in own) / max(seconds for seconds, _ in own)
        ratios.append(rates["ours"] / rates["classic"])
        print(f"| {number} | {rates['classic']:,.0f} | {rates['ours']:,.0f} | {ratios[-1]:.2f} |")
    print(f"\nmedian ratio {statistics.median(ratios):.2f} (the bar: 1.2)")


if __name__ == "__main__":
    main()
