"""The share of a device's peak that a run uses."""

from __future__ import annotations

import pytest

from gpt2jax.analysis.peak import PEAK_TFLOPS, Utilisation
from gpt2jax.config import ModelConfig


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", 312.0), ("NVIDIA H100 80GB HBM3", 989.4), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA L4", 121.0), ("NVIDIA L40S", 362.05),
        ("Tesla T4", 65.1), ("TPU v5 lite", 197.0), ("TPU v5", 459.0), ("TPU v4", 275.0), ("cpu", None),
    ],
)  # fmt: skip
def test_a_device_is_known_by_its_kind(kind: str, tflops: float | None) -> None:
    assert Utilisation.of(ModelConfig(), 1024, kind, 8).peak == (None if tflops is None else tflops * 8e12)


def test_no_name_hides_a_later_one() -> None:
    names = list(PEAK_TFLOPS)
    assert all(later not in (name for name in names[:i] if name in later) for i, later in enumerate(names))
    for i, name in enumerate(names):
        assert next(first for first in names if first.lower() in name.lower()) == name, f"{name} is never reached (place {i})"


def test_both_definitions_by_hand() -> None:
    """124M at 178,000 tokens/s on one A100 (llm.c's class of figure): 6 N + 12 L H K T a token, and half of attention's part when causal."""
    used = Utilisation.of(ModelConfig.preset("gpt2"), 1024, "NVIDIA A100-SXM4-80GB", 1)
    N, attention = 12 * 12 * 768**2 + 50257 * 768, 12 * 12 * 12 * 64 * 1024
    full, causal = used.at(178_000)
    assert full == pytest.approx(178_000 * (6 * N + attention) / 312e12)
    assert causal == pytest.approx(178_000 * (6 * N + attention * 1025 / 2048) / 312e12)
    assert used.at(0) == (0.0, 0.0) and Utilisation.of(ModelConfig(), 64, "cpu", 1).at(5.0) == (None, None)


def test_a_peak_of_ones_own_wins() -> None:
    assert Utilisation.of(ModelConfig(), 64, "TPU v4", 2, tflops=3.0).peak == 6e12
