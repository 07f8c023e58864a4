"""The range of each sampling setting, for the command and for `generate`. Imports nothing heavy: the command refuses a bad value before it loads a model."""

from __future__ import annotations

import math
import numbers
from typing import Any

from gpt2jax.errors import InputError


def check_new_tokens(value: Any) -> int:
    return _whole("max_new_tokens", value, "1 or more", least=1)


def check_top_k(value: Any) -> int:
    return _whole("top_k", value, "0 (no limit) or more")


def check_seed(value: Any) -> int:
    return _whole("seed", value, "between 0 and 4294967295", most=2**32 - 1)


def check_temperature(value: Any) -> float:
    """Finite in float32 and not negative."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) <= 3e38:
        raise InputError(f"temperature={value!r} must be a finite number, 0 (always the most likely token) or more")
    return float(value)


def check_text(name: str, text: str) -> None:
    """Bytes of the command line that are no UTF-8 reach us as lone surrogates, which no tokenizer can encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{name} is not valid UTF-8 text (at character {error.start}); give it in UTF-8") from None


def _whole(name: str, value: Any, limits: str, *, least: int = 0, most: float = math.inf) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= int(value) <= most:
        raise InputError(f"{name}={value!r} must be a whole number, {limits}")
    return int(value)
