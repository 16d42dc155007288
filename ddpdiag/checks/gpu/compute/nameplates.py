"""What makers say that a GPU reaches: products without sparsity, and the bandwidth of its memory.

A GPU is found by its whole name, as CUDA has it: "GH200 480GB" is no "H200", and one board comes with several memories.
A model that is not listed has no nameplate. Half precision is bf16, or fp16 where tensor cores know nothing else. Where
a data sheet has the rate with sparsity, half of it is taken, as its footnote says.
"""

from typing import NamedTuple


class Nameplate(NamedTuple):
    """Products in half and in single precision, and reads and writes of memory, per second."""

    half_flop_per_s: float
    single_flop_per_s: float
    memory_bytes_per_s: float


def _plate(half_teraflops: float, single_teraflops: float, memory_gigabytes: float) -> Nameplate:
    return Nameplate(half_teraflops * 1e12, single_teraflops * 1e12, memory_gigabytes * 1e9)


_NAMEPLATES = {
    # NVIDIA Blackwell data sheet (HGX B200, GB200 NVL72: 4.5 and 5 PFLOPS of FP16 with sparsity for each GPU).
    "B200": _plate(2250, 75, 7700),
    "GB200": _plate(2500, 80, 8000),
    # NVIDIA H200 data sheet (1,979 and 1,671 TFLOPS with sparsity).
    "H200": _plate(989, 67, 4800),
    "H200 NVL": _plate(835, 60, 4800),
    # NVIDIA GH200 Grace Hopper Superchip data sheet: 96 GB of HBM3 (the name counts the processor's memory) or 144 GB
    # of HBM3e.
    "GH200 480GB": _plate(989, 67, 4000),
    "GH200 120GB": _plate(989, 67, 4000),
    "GH200 144G HBM3e": _plate(989, 67, 4900),
    # NVIDIA H100 data sheet (SXM 1,979, PCIe 1,513 TFLOPS with sparsity).
    "H100 80GB HBM3": _plate(989, 67, 3350),
    "H100 PCIe": _plate(756, 51, 2000),
    # NVIDIA A100 data sheet.
    "A100-SXM4-40GB": _plate(312, 19.5, 1555),
    "A100-PCIE-40GB": _plate(312, 19.5, 1555),
    "A100-SXM4-80GB": _plate(312, 19.5, 2039),
    "A100 80GB PCIe": _plate(312, 19.5, 1935),
    # NVIDIA A30 and A40 data sheets.
    "A30": _plate(165, 10.3, 933),
    "A40": _plate(149.7, 37.4, 696),
    # NVIDIA L4 data sheet (242 TFLOPS with sparsity) and L40S data sheet.
    "L4": _plate(121, 30.3, 300),
    "L40S": _plate(362, 91.6, 864),
    # NVIDIA V100 and T4 data sheets: fp16.
    "V100-SXM2-16GB": _plate(125, 15.7, 900),
    "V100-SXM2-32GB": _plate(125, 15.7, 900),
    "V100-PCIE-16GB": _plate(112, 14, 900),
    "V100-PCIE-32GB": _plate(112, 14, 900),
    "T4": _plate(65, 8.1, 320),
}


def nameplate_of(device: str) -> Nameplate | None:
    """The nameplate of the GPU of that name; drivers put its maker or its series in front."""
    return _NAMEPLATES.get(device.removeprefix("NVIDIA ").removeprefix("Tesla "))
