"""The links of a GPU as NVML reports them: PCIe slot, NVLinks, NVSwitch fabric. Only a worker calls these functions.

Rates are those that NCCL assumes, in one direction (topo.h and topo.cc of NCCL 2.28). The rate of an NVLink depends on
the generation of the GPU, the rate of a PCIe slot on its generation and width.
"""

from collections.abc import Iterable

from msgspec import Struct

from ddpdiag.probes.gpu.nvml import Device, NvmlError, opened_nvml

# The counters NVML_NVLINK_ERROR_DL_* of nvml.h, each with the field that replaces the counter in newer drivers.
_ERROR_COUNTERS = {0: "DEV_NVLINK_ERROR_DL_REPLAY", 1: "DEV_NVLINK_ERROR_DL_RECOVERY"}
_MEGABYTE = 1e6
# nvml.h, nvmlIntNvLinkDeviceType_t: what is at the other end of a link.
TO_GPU, TO_SWITCH, TO_UNKNOWN = 0, 2, 255
_FABRIC_MEMBERS = ("state", "status", "healthSummary", "clusterUuid", "cliqueId")
# nvml.h: NVML_GPU_FABRIC_STATE_COMPLETED.
FABRIC_JOINED = 3


class PcieLink(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The PCIe link of a GPU: its present width, and the highest width and generation that card and slot both support.

    An idle card lowers its generation, so the present generation is not read. `replays` counts the packets that were
    sent again since the driver was loaded.
    """

    width: int | None = None
    width_max: int | None = None
    generation_max: int | None = None
    replays: int | None = None


class NvLink(Struct, frozen=True, kw_only=True, array_like=True):
    """One NVLink: whether it is up, its speed in one direction, and errors since the driver was loaded.

    `errors` counts replays and recoveries, which delay traffic. A link is recorded as a list of its fields, which is
    short for hosts with 144 links. New fields must be added at the end.
    """

    number: int
    up: bool
    bytes_per_s: float | None = None
    errors: int | None = None


class Fabric(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of the GPU in its NVSwitch fabric, in numbers of nvml.h (nvmlGpuFabricState_t, nvmlReturn_t).

    `state` is None if there is no fabric. `status` is valid only if `state` is FABRIC_JOINED. `cluster` is the UUID of
    the GPU's NVLink domain in hexadecimal, 0 if the domain does not span hosts (NCCL, mnnvl.cc). Two GPUs reach each
    other by NVLink if both their `cluster` and their `clique` are equal.
    """

    state: int | None = None
    status: int | None = None
    health: int | None = None
    cluster: str | None = None
    clique: int | None = None

    @property
    def domain(self) -> str | None:
        """The name of the GPU's NVLink domain: GPUs with equal names reach each other by NVLinks across hosts.

        None if the GPU has not joined a domain that spans hosts. The rule is NCCL's (mnnvl.cc, ncclMnnvlCheck).
        """
        if self.state != FABRIC_JOINED or self.cluster is None or int(self.cluster, 16) == 0:
            return None
        return f"{self.cluster}.{self.clique}"

    @property
    def may_span_hosts(self) -> bool:
        """Whether NVLinks may lead from this GPU to another host; also true if the driver does not say."""
        return self.state is not None and (self.cluster is None or int(self.cluster, 16) != 0)


def link_states(device: Device) -> dict[int, bool]:
    """Query whether each NVLink is up, by the link's number. Links whose state NVML does not report are omitted."""
    import pynvml

    states = {
        number: device.number("nvmlDeviceGetNvLinkState", number) for number in range(int(pynvml.NVML_NVLINK_MAX_LINKS))
    }
    return {number: bool(state) for number, state in states.items() if state is not None}


def link_end(device: Device, number: int) -> int | None:
    """Query the kind of device at the other end of a link: TO_GPU, TO_SWITCH, or another number of nvml.h."""
    return device.number("nvmlDeviceGetNvLinkRemoteDeviceType", number)


def nvlinks(device: Device, *, has_blackwell_fields: bool) -> tuple[NvLink, ...]:
    """Query all NVLinks whose state NVML reports; empty for a GPU without NVLink."""
    states = link_states(device)
    known = list(states)
    counts = {number: [_errors(device, number, counter) for counter in _ERROR_COUNTERS] for number in known}
    if has_blackwell_fields:
        # Blackwell GPUs count recoveries only in this field, although they answer the older queries.
        for number, events in zip(known, device.fields("DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS", known), strict=True):
            counts[number].append(events)
    return tuple(
        NvLink(
            number=number,
            up=states[number],
            bytes_per_s=None if speed is None else speed * _MEGABYTE,
            errors=_sum(counts[number]),
        )
        for number, speed in zip(known, device.fields("DEV_NVLINK_GET_SPEED", known), strict=True)
    )


def _errors(device: Device, link: int, counter: int) -> int | None:
    """Query an error counter of a link, or the field that replaces the counter if the GPU does not report it."""
    count = device.number("nvmlDeviceGetNvLinkErrorCounter", link, counter)
    return device.fields(_ERROR_COUNTERS[counter], [link])[0] if count is None else count


def _sum(counts: Iterable[int | None]) -> int | None:
    """The sum of the counts that are known; None if none is known."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def fabric(device: Device) -> Fabric:
    """Query the state of the GPU in its fabric, with the newest NVML structure that library and driver support."""
    for function, structure in (
        ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfo_v3_t"),
        ("nvmlDeviceGetGpuFabricInfoV", "c_nvmlGpuFabricInfoV_t"),
        ("nvmlDeviceGetGpuFabricInfo", "c_nvmlGpuFabricInfo_t"),
    ):
        members = device.members(function, structure, _FABRIC_MEMBERS)
        if members:
            return Fabric(
                # 0 means that the GPU does not support a fabric.
                state=members["state"] or None,
                status=members["status"],
                health=members.get("healthSummary"),
                cluster=f"{members['clusterUuid']:x}" if "clusterUuid" in members else None,
                clique=members.get("cliqueId"),
            )
    return Fabric()


# Bytes/s of one NVLink by compute capability. The highest entry not above the GPU's applies (NCCL, src/graph/topo.h).
_NVLINK_RATES = ((60, 18e9), (70, 20e9), (80, 20e9), (86, 12e9), (90, 20.6e9), (100, 40.1e9))
# The net rate of one PCIe lane by generation, in 100 Mbit/s (topo.cc, kvDictPciGen; width x rate / 80 is GB/s).
_PCIE_LANE_RATES = {1: 15, 2: 30, 3: 60, 4: 120, 5: 240, 6: 480}


class Connections(Struct, frozen=True, kw_only=True):
    """The links of one GPU to other GPUs and to the host; a value that NVML does not report is None.

    Rates are in one direction, and `nvlinks` counts the NVLinks that are up. `nvlink_switched` says whether all of them
    lead to NVSwitches. If not, some pairs of GPUs may have no NVLink. `nvlink_domain` is `Fabric.domain`.
    """

    nvlinks: int | None = None
    nvlink_switched: bool | None = None
    nvlink_bytes_per_s: float | None = None
    pcie_bytes_per_s: float | None = None
    nvlink_domain: str | None = None


def connections(uuid: str, capability: tuple[int, int]) -> Connections:
    """Query NVML for the links of the GPU with this UUID; all fields are None if NVML fails."""
    try:
        with opened_nvml() as pynvml:
            device = Device(pynvml.nvmlDeviceGetHandleByUUID(uuid))
            states = link_states(device)
            up = [number for number, is_up in states.items() if is_up]
            ends = [link_end(device, number) for number in up]
            return Connections(
                nvlinks=len(up) if states else None,
                nvlink_switched=None if not ends or None in ends else {*ends} == {TO_SWITCH},
                nvlink_bytes_per_s=len(up) * nvlink_rate(capability) if up else None,
                pcie_bytes_per_s=_pcie_rate(device),
                nvlink_domain=fabric(device).domain,
            )
    except (NvmlError, OSError):
        return Connections()


def nvlink_rate(capability: tuple[int, int]) -> float:
    """The rate of one NVLink in one direction, in bytes per second, for a GPU of this compute capability."""
    number = capability[0] * 10 + capability[1]
    return max((entry for entry in _NVLINK_RATES if entry[0] <= number), default=_NVLINK_RATES[0])[1]


def pcie_rate(generation: int, width: int) -> float | None:
    """The rate of a PCIe slot in one direction, in bytes/s, as NCCL assumes it (16 lanes of generation 4: 24 GB/s)."""
    return width * _PCIE_LANE_RATES[generation] / 80 * 1e9 if generation in _PCIE_LANE_RATES and width > 0 else None


def _pcie_rate(device: Device) -> float | None:
    """Query the highest generation and width of the GPU's PCIe link. Returns the rate in bytes per second."""
    generation = device.number("nvmlDeviceGetMaxPcieLinkGeneration")
    width = device.number("nvmlDeviceGetMaxPcieLinkWidth")
    return pcie_rate(generation, width) if generation and width else None
