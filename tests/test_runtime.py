"""What a process sets up, seen from outside: in a process of its own, since a heap cannot be set back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def in_a_process(code: str, **environment: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment})
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.skipif(not THP.is_file() or "[never]" in THP.read_text(), reason="this kernel gives no large pages")
def test_the_heap_keeps_its_memory_on_large_pages() -> None:
    code = """
from gpt2jax import runtime
runtime.start()
import ctypes  # numpy asks for large pages itself, XLA does not
libc, size = ctypes.CDLL(None), 64 << 20
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
x = libc.malloc(size)
ctypes.memset(x, 1, size)
rows = [line.split() for line in open("/proc/self/smaps")]
print(sum(int(row[1]) for row in rows if row[0] == "AnonHugePages:"))
before = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")][0]
libc.free(x)
print(before - [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")][0])
"""
    large, given_back = map(int, in_a_process(code).split())
    assert large >= 56 << 10, "in kB: all but the ends"
    assert given_back < 8 << 10


def test_a_limit_on_memory_is_no_error() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))"
    in_a_process(f"{limit}; from gpt2jax import runtime; runtime._keep_heap(); runtime._ask_for_large_pages()")


def test_the_compilation_cache_is_the_users_own(tmp_path: Path) -> None:
    code = "from gpt2jax import runtime; runtime.start(); import jax; print(jax.config.jax_compilation_cache_dir)"
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**environment, "GPT2JAX_CACHE": str(tmp_path)})
    assert result.stdout.strip() == str(tmp_path / "compiled")
    assert in_a_process(code, JAX_COMPILATION_CACHE_DIR="/somewhere/else").strip() == "/somewhere/else"
