"""Peak speed of devices, and the share of it that a run uses (model FLOPs utilisation; PaLM, arXiv:2204.02311, appendix B)."""

from __future__ import annotations

import dataclasses

from gpt2jax.analysis.inventory import take_inventory
from gpt2jax.model.config import ModelConfig

#: Dense bfloat16 (float16 where a device has no other) TFLOP/s of one JAX device, by what its `device_kind` holds; the first that fits counts. From the
#: vendors' data sheets, without sparsity: NVIDIA's for each GPU, Google's system architecture pages for TPUs (v2 and v3: half a chip, which is one JAX device).
PEAK_TFLOPS: dict[str, float] = {
    "B200": 2250.0,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "A100": 312.0,
    "L40S": 362.05,
    "L4": 121.0,
    "A10G": 70.0,
    "V100": 125.0,
    "T4": 65.1,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "TPU v6 lite": 918.0,
    "TPU v6e": 918.0,
    "TPU v5 lite": 197.0,
    "TPU v5e": 197.0,
    "TPU v5p": 459.0,
    "TPU v5": 459.0,
    "TPU v4": 275.0,
    "TPU v3": 61.5,
    "TPU v2": 22.5,
}


@dataclasses.dataclass(frozen=True)
class Utilisation:
    """Of a run: training FLOPs a token with every token seeing the whole context, and with what causal order leaves; peak FLOP/s of all devices, if known."""

    flops: int
    causal_flops: int
    peak: float | None

    @classmethod
    def of(cls, config: ModelConfig, tokens: int, device_kind: str, devices: int, tflops: float | None = None) -> Utilisation:
        """tokens: the sequence length. tflops: of one device, in place of the table's."""
        inventory = take_inventory(config, tokens)
        peak = tflops or next((value for name, value in PEAK_TFLOPS.items() if name.lower() in device_kind.lower()), None)
        return cls(3 * inventory.forward_flops, 3 * inventory.causal_forward_flops, None if peak is None else peak * 1e12 * devices)

    def at(self, tokens_per_s: float) -> tuple[float | None, float | None]:
        """The share of the peak: with attention counted in full, and causal. None where the peak is not known."""
        if self.peak is None:
            return None, None
        return tokens_per_s * self.flops / self.peak, tokens_per_s * self.causal_flops / self.peak
