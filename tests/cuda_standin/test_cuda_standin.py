"""ddpdiag on the real CUDA wheel of torch, with both classes of process groups, on GPUs that do not exist."""

import subprocess
import sys
import threading
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest
from cuda_faults import FAULTS
from cuda_runs import healthy, run
from cuda_standin import GROUPS, HERE
from jobs import free_port

from ddpdiag.codec import read_recording

pytestmark = pytest.mark.long

# By the number of GPUs; eight on two cores take more than a minute.
HEALTHY_RUNS = {2: 20, 8: 10}


@pytest.mark.parametrize("group", GROUPS)
def test_collectives_give_right_values(cuda, group):
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", HERE / "check_collectives.py")
    env = _path() | cuda.variables(2, group)
    done = subprocess.run([cuda.python, *command], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok 2 ranks" in done.stdout


@pytest.mark.alone
@pytest.mark.parametrize("gpus", [2, 8])
@pytest.mark.parametrize("group", GROUPS)
def test_healthy(cuda, show, tmp_path, group, gpus):
    fit, seconds, wrong = 0, [], []
    for number in range(HEALTHY_RUNS[gpus]):
        result = run(cuda, "healthy", healthy(gpus), group, tmp_path / str(number))
        fit += not result.flaws
        seconds.append(result.seconds)
        wrong += result.flaws
        if number == 0:
            first = result
    spread = f"{min(seconds):.0f} to {max(seconds):.0f} s"
    show.append(f"healthy, {gpus} GPUs, {group}: {fit} of {HEALTHY_RUNS[gpus]} FIT without a warning, {spread}")
    show.extend(f"  {text}" for text in dict.fromkeys(wrong))
    assert not wrong, f"{wrong}\n{first.told}"


@pytest.mark.alone
@pytest.mark.parametrize("group", GROUPS)
def test_the_diagnostics_of_a_healthy_nccl_cost_little_and_find_nothing(cuda, show, tmp_path, group):
    """Seconds of COL001 with NCCL 2.32, whose diagnostics run, beside 2.30, which has none."""
    seconds = {}
    for version in ("2.30.7", "2.32.3"):
        record = tmp_path / f"{version}.jsonl"
        fault = replace(healthy(2), environment={"FAKENCCL_VERSION": version})
        options = ("--stage", "launch,collective", "--record", str(record))
        result = run(cuda, "healthy", replace(fault, options=options), group, tmp_path / version)
        outcomes = [each for each in read_recording([record]).outcomes if each.code == "COL001"]
        lines = sum(b'"level":"OK"' in bytes(each.data) for each in outcomes)
        assert (not result.flaws, lines) == (True, int(version == "2.32.3")), f"{result.flaws}\n{result.told}"
        seconds[version] = max(each.seconds for each in outcomes)
    show.append(f"COL001, {group}: " + ", ".join(f"NCCL {name} {each:.2f} s" for name, each in seconds.items()))
    assert seconds["2.32.3"] < seconds["2.30.7"] + 1.0


_LOOP = """
import os, time, torch, torch.distributed as dist
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
while True:
    dist.all_reduce(torch.ones(8, device=device))
    torch.cuda.synchronize()
    time.sleep(0.05)
"""


@pytest.mark.parametrize("group", GROUPS)
def test_watch_names_the_rank_that_launched_fewer_collectives_by_ras(cuda, tmp_path, group):
    """Rank 1 never posts its 30th all-reduce. Without py-spy and the flight recorder only RAS shows it."""
    (tmp_path / "loop.py").write_text(_LOOP)
    variables = {
        "NCCL_RAS_ADDR": f"localhost:{free_port()}",
        "FAKETORCH_FAULT": "sleep 1 30",
        "TORCH_FR_BUFFER_SIZE": "0",
    }
    launch = (cuda.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", tmp_path / "loop.py")
    command = (cuda.python, "-m", "ddpdiag", "watch", "--stall", "4", "--", *launch)
    env = cuda.variables(2, group) | variables | {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as watch:
        limit = threading.Timer(60, watch.terminate)
        limit.start()
        told = list(takewhile(lambda line: "launched 29 AllReduce; rank 0 launched 30" not in line, watch.stderr))
        is_named = limit.is_alive()
        limit.cancel()
        watch.terminate()
    assert is_named, "".join(told)
    assert "rank 1 launched fewer" in "".join(told)


# What they take on a host with eight GPUs, by public figures.
PUBLISHED = {"FAKENCCL_COMMUNICATOR_SECONDS": "2.5", "FAKECUDA_CONTEXT_SECONDS": "1", "FAKE_NVML_OPEN_SECONDS": "0.3"}
LINK_SECONDS = 0.04  # of ddpdiag/workloads/copies.py, for each link


@pytest.mark.alone
@pytest.mark.parametrize(("gpus", "contexts"), [(2, 4), (8, 16)])
@pytest.mark.parametrize("group", GROUPS)
def test_a_healthy_check_makes_few_communicators_and_contexts(cuda, show, tmp_path, group, gpus, contexts):
    """One context for each rank, and in rank 0's process, which copies between all GPUs, one for each other GPU."""
    counts, record = tmp_path / "counts", tmp_path / "recording"
    fault = replace(healthy(gpus), environment={**PUBLISHED, "FAKECUDA_COUNTS": str(counts)})
    fault = replace(fault, options=(*fault.options, "--record", str(record)))
    result = run(cuda, "healthy", fault, group, tmp_path / "run")
    made = [line.split() for line in counts.read_text().splitlines()]
    communicators = {words[2]: int(words[3]) for words in made if words[0] == "communicator"}
    count = sum(words[0] == "context" for words in made)
    recording = read_recording([record])
    copies = sum(o.seconds - o.timings.get("context", 0.0) for o in recording.outcomes if o.code == "P2P002")
    on_gpus = LINK_SECONDS * (2 * gpus + gpus * (gpus - 1))
    show.append(
        f"{gpus} GPUs, {group}: {len(communicators)} communicators, {count} contexts, {result.seconds:.0f} s with "
        f"published costs; {result.seconds - copies + on_gpus:.0f} s with the {copies:.0f} s of P2P002's copies, whose "
        f"words the cores compare here, at the {on_gpus:.1f} s that they have on GPUs"
    )
    assert 1 <= len(communicators) <= 2
    assert set(communicators.values()) == {gpus}
    assert count <= contexts
    assert not result.flaws, f"{result.flaws}\n{result.told}"


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", FAULTS)
def test_fault(results, name, group):
    result = results[name, group]
    found = [(finding["severity"], finding["code"], finding["ranks"]) for finding in result.findings]
    assert not result.flaws, f"{'; '.join(result.flaws)}\n{found}\n{result.told}"


def _path() -> dict[str, str]:
    return {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(Path.home()), "OMP_NUM_THREADS": "1"}
