"""The inventory of a report: what each kind of host has, from the checks' own data."""

import json
from pathlib import Path

import pytest
from msgspec import structs
from reports import fit
from seen import seen_of

from ddpdiag.checks.api import Check
from ddpdiag.checks.gpu import present
from ddpdiag.checks.host import cores, limits, memory, rdma_ports
from ddpdiag.checks.launch import versions
from ddpdiag.checks.registry import all_checks
from ddpdiag.checks.rendezvous import interfaces as rdz003
from ddpdiag.codec import indented_json, read_recording
from ddpdiag.judgement import judge
from ddpdiag.model.report import INVENTORY, HostKind
from ddpdiag.probes.gpu.nvml import Enumeration, ListedGpu
from ddpdiag.probes.net.adapters import Port
from ddpdiag.probes.net.interfaces import Ifnames, Interface
from ddpdiag.render import html, markdown
from ddpdiag.render.terminal import render

RECORDINGS = Path(__file__).parents[1] / "recordings"
GIB = 1 << 30
H100 = "NVIDIA H100 80GB HBM3"


def parts(check: Check, data: object, ranks: int = 1, **world: object) -> dict[str, str]:
    """What the check says of its first host, of which all ranks give the same data."""
    found = check.report(seen_of(check, dict.fromkeys(range(ranks), data), **world)).inventory
    assert {part for own in found.values() for part in own} <= set(INVENTORY)
    return dict(found.get(0, {}))


def gpus(*found: ListedGpu, **fields: object) -> present.Data:
    nvml = Enumeration(gpus=found, driver="550.54.15" if found else None)
    return present.Data(**{"nvml": nvml, "functions": (), "visible": len(found)} | fields)


@pytest.mark.parametrize(
    ("check", "data", "expected"),
    [
        (cores.CHECK, cores.Data(cores=8, affinity=tuple(range(8)), model="Intel(R) Xeon(R)  @ 2.2GHz"),
         {"CPU": "8 cores (Intel Xeon @ 2.2GHz)"}),
        (cores.CHECK, cores.Data(cores=None, affinity=(), kernel="6.8.0-79"), {"kernel": "6.8.0-79"}),
        (cores.CHECK, cores.Data(cores=8, affinity=(0, 1)), {"CPU": "2 of 8 cores (model unknown)"}),
        (cores.CHECK, cores.Data(cores=None, affinity=()), {}),
        (memory.CHECK, memory.Data(total_bytes=503 * GIB), {"memory": "503 GiB"}),
        (memory.CHECK, memory.Data(total_bytes=503 * GIB, limit_bytes=16 * GIB), {"memory": "16 GiB of 503 GiB"}),
        (memory.CHECK, memory.Data(), {}),
        (limits.CHECK, limits.Data(limits=None, rdma=()), {"RDMA": "none"}),
        (limits.CHECK, limits.Data(limits=None, rdma=None), {}),
        (versions.CHECK, versions.Data(python="3.12.1", torch="2.7.0+cu128", cuda="12.8", nccl="2.26.2", driver="1.2"),
         {"torch": "2.7.0+cu128", "CUDA": "12.8", "NCCL": "2.26.2", "driver": "1.2"}),
        (versions.CHECK, versions.Data(python="3.12.1", torch="2.7.0+cpu"),
         {"torch": "2.7.0+cpu", "CUDA": "none", "NCCL": "none"}),
        (present.CHECK,
         gpus(*(ListedGpu(index=n, uuid=f"GPU-{n}", name=H100, memory_bytes=80 * GIB) for n in range(8))),
         {"GPU": f"8 x {H100} (80 GiB)", "driver": "550.54.15"}),
        (present.CHECK, gpus(), {"GPU": "none", "driver": "none"}),
        (present.CHECK, gpus(visible=2), {"GPU": "2 GPUs that NVML does not show"}),
        (present.CHECK, gpus(functions=None), {}),
        (rdma_ports.CHECK, rdma_ports.Data(ports=tuple(
            Port(adapter=f"mlx5_{n}", number="1", infiniband=True, active=n < 7, bytes_per_s=50e9,
                 link_layer="InfiniBand") for n in range(8))),
         {"RDMA": "7 x 400 Gbit/s InfiniBand, 1 down"}),
    ],
)  # fmt: skip
def test_a_check_says_what_a_host_has_and_nothing_of_what_it_could_not_read(check, data, expected):
    assert parts(check, data) == expected


def test_the_network_is_the_interface_that_the_job_uses():
    eth = Interface(name="eth0", addresses=("10.0.0.1",), bytes_per_s=12.5e9)
    data = rdz003.Data(
        interfaces=(eth,),
        own_addresses=("10.0.0.1",),
        variables=Ifnames(gloo=None, nccl=None),
        source_address="10.0.0.1",
    )
    assert parts(rdz003.CHECK, data, ranks=4) == {"network": "eth0 (100 Gbit/s)"}
    slow = structs.replace(data, interfaces=(structs.replace(eth, bytes_per_s=None),))
    assert parts(rdz003.CHECK, slow, ranks=4) == {"network": "eth0 (speed unknown)"}
    assert parts(rdz003.CHECK, data) == {"network": "not used (one host)"}


def test_hosts_that_are_alike_are_one_kind_and_what_nobody_read_is_unknown():
    (kind,) = judge(read_recording([RECORDINGS / "slow-host-3-ranks.jsonl"]), all_checks()).inventory
    assert kind.hosts == ("n0", "n1", "n2")
    assert tuple(kind.parts) == INVENTORY
    # That run had none of the other checks.
    assert kind.parts == dict.fromkeys(INVENTORY, "unknown") | {"network": "eth0 (speed unknown)"}


def two_kinds() -> tuple[HostKind, ...]:
    usual = (f"8 x {H100} (80 GiB)", "192 cores (AMD EPYC 9654)", "1.97 TiB", "6.8.0-79", "550.54.15", "2.7.0+cu128",
             "12.8", "2.26.2", "eth0 (100 Gbit/s)", "8 x 400 Gbit/s InfiniBand")  # fmt: skip
    kind = HostKind(hosts=("n0", "n1", "n2"), parts=dict(zip(INVENTORY, usual, strict=True)))
    odd = HostKind(hosts=("n3",), parts=kind.parts | {"NCCL": "unknown", "CUDA": "unknown", "RDMA": "none"})
    return kind, odd


def test_the_inventory_leads_a_healthy_report_one_line_for_each_kind(golden):
    report = fit(inventory=two_kinds())
    text = render(report, color=False, width=80)
    assert text.index("3 hosts (n[0-2])") < text.index("1 host (n3)") < text.index("ok    launch")
    assert "no RDMA; unknown: CUDA, NCCL" in " ".join(text.split())
    alike = render(structs.replace(report, inventory=two_kinds()[:1]), color=False, width=80)
    assert f"\n3 hosts: 8 x {H100}" in alike
    golden(text, alike)


def test_the_inventory_is_in_all_formats():
    report = fit(inventory=two_kinds())
    assert f"- 3 hosts (n\\[0-2\\]): 8 x {H100}" in markdown.render(report)
    assert html.render(report).count(H100) == 2
    assert [kind["hosts"] for kind in json.loads(indented_json(report))["inventory"]] == [["n0", "n1", "n2"], ["n3"]]
