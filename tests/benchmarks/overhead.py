"""What does looking cost? The detectors that run inside a training step, against the same step without them.

    python tests/benchmarks/overhead.py [--steps 400] [--batch 32]

Two ranks over gloo take ordinary DDP steps on MNIST's digits. In each pair of steps one is watched, as all are in
`ddpdiag check` (the step announced in shared memory, the laps of a stopwatch), and one is not, in turns; the median of
the pairs' ratios is what watching costs. On two cores the noise of a step is some per cent, so that the second line is
the better one: the same calls without a step between them, as a share of the median step. The third is the search for
gradients that are not finite, in hooks, which is no part of the timing. The bar: 0.4 %.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time

LAPS = ("data", "forward", "backward", "optimizer")


def work(rank, store, steps, batch, told):  # noqa: C901 - a script of two loops, read from top to bottom
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    from ddpdiag.runtime.supervisor.ipc import StepPage
    from ddpdiag.workloads import mnist, training

    torch.set_num_threads(1)
    digits, device, page = mnist.load(), torch.device("cpu"), StepPage.create()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    schedule = training.Schedule(steps=steps, global_batch=2 * batch, learning_rate=1e-3)
    model = DistributedDataParallel(training.seeded_network(schedule, device))
    optimizer, _ = training.optimizer_of(model, schedule)
    indices = training.batches(len(digits.train_images), schedule, rank, 2)
    watch = training.Stopwatch(device)

    def announced(number):
        page.write(number, f"training step {number} of {steps}")
        watch.lap()

    def step(number, watched):
        lap = watch.lap if watched else lambda phase: None
        begin = time.perf_counter()
        if watched:
            announced(number)
        chosen = next(indices)
        images, labels = training.prepared(digits.train_images[chosen], digits.train_labels[chosen], device)
        lap("data")
        loss = cross_entropy(model(images), labels)
        lap("forward")
        optimizer.zero_grad()
        loss.backward()
        lap("backward")
        optimizer.step()
        lap("optimizer")
        return time.perf_counter() - begin

    seconds = {True: [], False: []}
    for number in range(steps + 10):
        pair = (True, False) if number % 2 else (False, True)
        for watched in pair:
            took = step(number, watched)
            if number >= 10:
                seconds[watched].append(took)

    def bare(number):
        announced(number)
        for name in LAPS:
            watch.lap(name)

    calls = each(bare, 2000)
    total = training.watch_gradients(model, device)
    gradients = [parameter.grad for parameter in model.parameters()]

    def hooks(number):
        for gradient in gradients:
            total.add_(gradient.sum())

    told.put((seconds, calls, each(hooks, 200)))
    dist.destroy_process_group()


def each(call, times):
    """Median seconds of one of many calls, in ten runs."""
    runs = []
    for _ in range(10):
        begin = time.perf_counter()
        for number in range(times):
            call(number)
        runs.append((time.perf_counter() - begin) / times)
    return statistics.median(runs)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="pairs of steps (default: 400)")
    parser.add_argument("--batch", type=int, default=32, help="images of each rank in a step (default: 32)")
    asked = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=work, args=(rank, f"{folder}/store", asked.steps, asked.batch, told))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        answers = [told.get(timeout=300) for _ in processes]
        for process in processes:
            process.join()
    plain = [one for seconds, _, _ in answers for one in seconds[False]]
    watched = [one for seconds, _, _ in answers for one in seconds[True]]
    ratio = statistics.median(with_it / without for with_it, without in zip(watched, plain, strict=True))
    median = statistics.median(plain)
    calls, hooks = (statistics.median(answer[index] for answer in answers) for index in (1, 2))
    print(f"a step of {asked.batch} images: {median * 1e3:.2f} ms (median of {len(plain)})\n")
    print("| what | cost | share of the step |\n|---|--:|--:|")
    print(f"| watched against not, median of {len(plain)} pairs | | {ratio - 1:+.2%} |")
    print(f"| the calls that watch, alone | {calls * 1e6:.1f} us | {calls / median:.3%} (the bar: 0.4 %) |")
    print(f"| the search for gradients that are not finite | {hooks * 1e6:.1f} us | {hooks / median:.3%} |")


if __name__ == "__main__":
    main()
