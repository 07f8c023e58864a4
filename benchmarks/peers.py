"""The programs that the benchmark of decoding compares, and how any benchmark runs programs: each in a process of its own, with as many threads as cores.

A program of decoding is a function from the models' folder to `run(prompts, new_tokens) -> ids`: greedy, all with the same random weights, prompts of one
length.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
Run = Callable[[list[list[int]], int], list[list[int]]]

#: What `gpt2jax.runtime` sets, given to every program: memory that is freed stays with the process.
KEEP_HEAP = dict(MALLOC_ARENA_MAX="1", MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_="200000000000", MALLOC_TOP_PAD_="67108864")


def gpt2jax_program(folder: Path, weights_dtype: str) -> Run:
    import gpt2jax
    from gpt2jax import runtime
    from gpt2jax.decoding.weights import quantize

    runtime.start()
    if (folder / "config.json").is_file():
        model, _ = gpt2jax.load(folder, weights_dtype=weights_dtype)
    else:
        import jax

        config = gpt2jax.ModelConfig.preset("gpt2")
        model = quantize(jax.jit(lambda key: gpt2jax.GPT2(config, key))(jax.random.key(0)), weights_dtype)

    def run(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        return [row.tokens for row in gpt2jax.generate(model, prompts, max_new_tokens=new_tokens, temperature=0, eos_token_id=None)]

    return run


def transformers_program(folder: Path, dtype: str) -> Run:
    import torch
    import transformers

    torch.set_num_threads(CORES)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None

    def run(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        return out[:, ids.shape[1] :].tolist()

    return run


def ctranslate2_program(folder: Path, dtype: str) -> Run:
    import ctranslate2

    generator = ctranslate2.Generator(str(folder / f"ctranslate2-{dtype}"), device="cpu", intra_threads=CORES, inter_threads=1)
    names = {i: name for name, i in json.loads((folder / "vocab.json").read_text(encoding="utf-8")).items()}

    def run(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        tokens = [[names[i] for i in row] for row in prompts]
        lengths = dict(max_length=new_tokens, min_length=new_tokens, include_prompt_in_result=False, end_token=[])
        return [result.sequences_ids[0] for result in generator.generate_batch(tokens, sampling_topk=1, **lengths)]

    return run


def llama_cpp_program(folder: Path, dtype: str) -> Run:
    import llama_cpp

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(folder / f"{dtype}.gguf").encode(), llama_cpp.llama_model_default_params())

    @functools.cache
    def context(rows: int, slots: int) -> tuple[object, object]:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch, params.n_ubatch = rows * slots, rows, rows * slots, 512
        params.n_threads = params.n_threads_batch = CORES
        return llama_cpp.llama_init_from_model(model, params), llama_cpp.llama_batch_init(rows * slots, 0, 1)

    def run(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        rows = len(prompts)
        ctx, batch = context(rows, -(-(len(prompts[0]) + new_tokens) // 256) * 256)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(ctx), True)
        news: list[list[int]] = [[] for _ in prompts]
        feed, position = prompts, 0
        while True:
            T = len(feed[0])
            batch.n_tokens = rows * T
            for i, (row, t) in enumerate((row, t) for row in range(rows) for t in range(T)):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = feed[row][t], position + t, 1, row, t == T - 1
            if llama_cpp.llama_decode(ctx, batch):
                raise SystemExit("llama_decode failed")
            for row, new in enumerate(news):
                logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(ctx, row * T + T - 1), (50257,))
                new.append(int(logits.argmax()))
            if len(news[0]) == new_tokens:
                return news
            feed, position = [[new[-1]] for new in news], position + T

    return run


PROGRAMS: dict[str, Callable[[Path], Run]] = {
    "gpt2jax fp32": functools.partial(gpt2jax_program, weights_dtype="float32"),
    "gpt2jax bf16": functools.partial(gpt2jax_program, weights_dtype="bfloat16"),
    "gpt2jax int8": functools.partial(gpt2jax_program, weights_dtype="int8"),
    "transformers fp32": functools.partial(transformers_program, dtype="float32"),
    "transformers bf16": functools.partial(transformers_program, dtype="bfloat16"),
    "ctranslate2 fp32": functools.partial(ctranslate2_program, dtype="float32"),
    "ctranslate2 int8": functools.partial(ctranslate2_program, dtype="int8"),
    "llama.cpp f32": functools.partial(llama_cpp_program, dtype="F32"),
    "llama.cpp q8_0": functools.partial(llama_cpp_program, dtype="Q8_0"),
}


def missing(program: str) -> list[str]:
    """The packages that a program needs and that are not here."""
    name = program.split()[0]
    needed = {"transformers": ["torch"], "ctranslate2": ["ctranslate2", "torch", "transformers"], "llama.cpp": ["llama_cpp", "gguf", "torch", "transformers"]}
    return [package for package in needed.get(name, []) + ([name] if name == "transformers" else []) if importlib.util.find_spec(package) is None]


def make_models(folder: Path, programs: list[str]) -> None:
    """The random weights as a Hugging Face folder, and what else each program reads."""
    if {program.split()[0] for program in programs} <= {"gpt2jax"}:
        return
    import torch
    import transformers

    from gpt2jax.tokenizer import load_tokenizer

    if not (folder / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        transformers.GPT2LMHeadModel(transformers.GPT2Config()).save_pretrained(folder)
        load_tokenizer("gpt2").save_hf(folder)
    for program in programs:
        name, dtype = program.split()
        if name == "ctranslate2":
            import ctranslate2

            dtype = {"fp32": "float32"}.get(dtype, dtype)
            if not (out := folder / f"ctranslate2-{dtype}").exists():
                ctranslate2.converters.TransformersConverter(str(folder)).convert(str(out), quantization=dtype)
        if name == "llama.cpp" and not (out := folder / f"{dtype.upper()}.gguf").exists():
            model = transformers.GPT2LMHeadModel.from_pretrained(folder)
            write_gguf(out, {key: value.numpy() for key, value in model.state_dict().items()}, dtype.upper())


def write_gguf(path: Path, weights: dict[str, np.ndarray], dtype: str) -> None:
    """GPT-2 124M's weights for llama.cpp, matrices in `dtype` (F32 or Q8_0), without a vocabulary."""
    import gguf

    writer = gguf.GGUFWriter(path, "gpt2")
    for add, value in (
        (writer.add_context_length, 1024), (writer.add_embedding_length, 768), (writer.add_feed_forward_length, 3072), (writer.add_block_count, 12),
        (writer.add_head_count, 12), (writer.add_layer_norm_eps, 1e-5), (writer.add_tokenizer_model, "no_vocab"), (writer.add_vocab_size, 50257),
    ):  # fmt: skip
        add(value)
    names = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}
    parts = {"ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
    names |= {f"h.{i}.{theirs}": f"blk.{i}.{ours}" for i in range(12) for theirs, ours in parts.items()}
    for name, kind in ((name, kind) for name in names for kind in ("weight", "bias") if f"transformer.{name}.{kind}" in weights):
        x = weights[f"transformer.{name}.{kind}"]
        x = np.ascontiguousarray(x.T) if "c_" in name else x  # Conv1D is [in, out]
        to = getattr(gguf.GGMLQuantizationType, dtype if x.ndim == 2 and name != "wpe" else "F32")
        writer.add_tensor(f"{names[name]}.{kind}", gguf.quants.quantize(x, to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve(run: Callable[..., Any]) -> None:
    """Answer each line of arguments with a line of the seconds that `run` took and what it returned."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    for line in sys.stdin:
        arguments = json.loads(line)
        start = time.perf_counter()
        result = run(*arguments)
        print(json.dumps([time.perf_counter() - start, result]), file=answers, flush=True)


class Worker:
    """A program in its own process, that `serve`s."""

    def __init__(self, script: str, *options: str) -> None:
        command = [sys.executable, script, *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **KEEP_HEAP})

    def __call__(self, *arguments: Any) -> tuple[float, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(arguments), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"{self.process.args} has ended; its messages stand above")
        seconds, result = json.loads(answer)
        return seconds, result

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
