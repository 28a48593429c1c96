"""Published specifications of devices that a run can be planned for. Imports no torch.

Dense rates, without sparsity, accumulated in fp32; memory and bandwidth in decimal units, as datasheets have them.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmtool.config.messages import of_value
from lmtool.errors import UserError, nearest

# The range of the fraction of a published rate that training reaches. Others report 24% and 31% of an A100 (BERT-base
# in mosaicml/examples' baseline; T5 in nanoT5), 33 to 39% of an H100 (torchtitan's Llama 3 8B), and 40 to 46% (llm.c's
# GPT-2 124M, nanochat's d12 and d18). For lmtool it has not been measured on a GPU.
UTILIZATION = (0.25, 0.5)

# Bytes per second from a device to other nodes: 400 Gb/s per GPU, as with InfiniBand NDR and in Llama 3's clusters
# (Grattafiori et al. 2024, section 3.3.1). NODE: number of GPUs connected by a machine's faster links.
NETWORK = 50e9
NODE = 8


@dataclass(frozen=True)
class Device:
    """A device. memory: bytes. bf16, fp16, fp32: FLOP/s of matrix products; None if the device does not support the
    format. bandwidth: bytes per second of its memory. link: bytes per second to another device of the machine, in one
    direction. cuda: whether it is a GPU."""

    memory: float
    bf16: float | None
    fp16: float | None
    fp32: float
    bandwidth: float
    link: float
    cuda: bool = True

    def rate(self, precision: str) -> float:
        """FLOP/s in a number format; an emulated format is as fast as fp32."""
        return {"bf16": self.bf16, "fp16": self.fp16}.get(precision) or self.fp32


_PCIE4 = 32e9  # x16, one way
DEVICES: dict[str, Device] = {
    # NVIDIA H100 Tensor Core GPU datasheet, SXM5; fourth-generation NVLink, 900 GB/s both ways.
    "h100": Device(80e9, 989e12, 989e12, 67e12, 3.35e12, 450e9),
    # NVIDIA H200 Tensor Core GPU datasheet, SXM.
    "h200": Device(141e9, 989e12, 989e12, 67e12, 4.8e12, 450e9),
    # NVIDIA A100 Tensor Core GPU datasheet, SXM4, with 80 GB and with 40 GB; NVLink 600 GB/s both ways.
    "a100": Device(80e9, 312e12, 312e12, 19.5e12, 2.039e12, 300e9),
    "a100_40gb": Device(40e9, 312e12, 312e12, 19.5e12, 1.555e12, 300e9),
    # NVIDIA V100 Tensor Core GPU datasheet, SXM2 32 GB; it has no bf16. NVLink 300 GB/s both ways.
    "v100": Device(32e9, None, 125e12, 15.7e12, 0.9e12, 150e9),
    # NVIDIA L40S datasheet.
    "l40s": Device(48e9, 362e12, 362e12, 91.6e12, 0.864e12, _PCIE4),
    # NVIDIA L4 datasheet: 242 TFLOP/s with sparsity.
    "l4": Device(24e9, 121e12, 121e12, 30.3e12, 0.3e12, _PCIE4),
    # NVIDIA A10 datasheet.
    "a10": Device(24e9, 125e12, 125e12, 31.2e12, 0.6e12, _PCIE4),
    # NVIDIA T4 datasheet; Turing has no bf16. PCIe 3.
    "t4": Device(16e9, None, 65e12, 8.1e12, 0.32e12, 16e9),
    # NVIDIA Ada GPU architecture whitepaper, appendix A (fp16 with fp32 accumulate).
    "rtx4090": Device(24e9, 165.2e12, 165.2e12, 82.6e12, 1.008e12, _PCIE4),
    # NVIDIA Ampere GA102 GPU architecture whitepaper, appendix A.
    "rtx3090": Device(24e9, 71e12, 71e12, 35.6e12, 0.936e12, _PCIE4),
    # Four cores at 3 GHz with two 256-bit fused multiply-adds a cycle (AVX2), two channels of DDR4-3200 (JEDEC
    # JESD79-4), 16 GB.
    "laptop": Device(16e9, None, None, 4 * 3e9 * 32, 51.2e9, _PCIE4, cuda=False),
}


def device_of(name: str) -> Device:
    """Returns a device of the table. Raises UserError, with the nearest name, for any other name."""
    if name in DEVICES:
        return DEVICES[name]
    close = of_value("device", name) or nearest(name, [*DEVICES, "auto", "cpu", "cuda"])
    choices = f"auto, cpu, cuda, cuda:N, {', '.join(DEVICES)}"
    raise UserError(
        f"device={name}: a plan needs a device of this machine (auto, cpu, cuda, cuda:N) or a GPU whose published "
        "speed lmtool knows",
        f"did you mean device={close}? Known: {choices}" if close else f"known: {choices}",
    )
