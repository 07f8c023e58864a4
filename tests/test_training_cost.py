"""What the compiled step costs has not grown: no timed test, but XLA's own figures beside the golden ones of this jax."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

GOLDEN = Path(__file__).parent / "golden"
TOLERANCE = 0.05


@pytest.mark.slow
def test_the_compiled_step_costs_what_it_did() -> None:
    """Floating-point operations, bytes accessed and temporaries. One that costs less should renew the golden file too, or the next growth is not seen."""
    known = json.loads((GOLDEN / "step_costs.json").read_text())
    if jax.__version__ not in known:
        pytest.skip(f"no figures for jax {jax.__version__}; add them with python tests/golden/make_step_costs.py")
    made = subprocess.run([sys.executable, GOLDEN / "make_step_costs.py", "--print"], capture_output=True, text=True, cwd=GOLDEN.parent.parent, check=True)
    found = json.loads(made.stdout)
    changed = [
        f"{case}: {what} {was:,} -> {found[case][what]:,}"
        for case, costs in known[jax.__version__].items()
        for what, was in costs.items()
        if abs(found[case][what] / was - 1) > TOLERANCE
    ]
    assert not changed, "; ".join(changed)
