"""What `scripts.benchmark draft` times: the engines of one model in turn, and the floor that memory sets.

Every engine decodes the same random prompts for the same number of steps, none ends early, none reuses a prefix. Rounds
go through all engines before the next begins, so that a slow minute of the machine meets all of them alike; the median
of the rounds is reported. llama.cpp runs in a process of its own environment and times itself there.

Legend: B batch.
"""

import contextlib
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafter.decoder import Decoder, decoder_of
from drafter.engine import choose_forward
from drafter.native import library
from drafter.stepping import decode

PROMPT_TOKENS, PREFILL_TOKENS, STEPS = 100, 512, 16
FEW_IDS = 16_384  # of a draft vocabulary, for the row that shows what a shorter head saves

# The program of the other process: a line of JSON in, a line of JSON out, until its input ends.
LLAMA = """
import json, sys, time
import llama_cpp
from llama_cpp import llama_cpp as lib
path, threads, slots, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
quiet = lib.llama_log_callback(lambda level, text, data: None)
lib.llama_log_set(quiet, None)
model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
settings = lib.llama_context_default_params()
settings.n_ctx, settings.n_batch, settings.n_ubatch, settings.n_seq_max = length * slots, 512, 512, slots
settings.n_threads = settings.n_threads_batch = threads
context = lib.llama_init_from_model(model, settings)
memory = lib.llama_get_memory(context)
def run(tokens, positions, slots, wanted):
    batch = lib.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, positions[i], 1, wanted[i]
        batch.seq_id[i][0] = slots[i]
    if lib.llama_decode(context, batch):
        raise SystemExit("llama_decode failed")
    lib.llama_synchronize(context)
    lib.llama_batch_free(batch)
print(json.dumps({"system": lib.llama_print_system_info().decode()}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    lib.llama_memory_clear(memory, True)
    started, length = time.perf_counter(), len(job["prompts"][0])
    for slot, prompt in enumerate(job["prompts"]):
        run(prompt, list(range(length)), [slot] * length, [0] * (length - 1) + [1])
    prefill = time.perf_counter() - started
    count = len(job["prompts"])
    started = time.perf_counter()
    for step in range(job["steps"]):
        run(job["next"][step][:count], [length + step] * count, list(range(count)), [1] * count)
        for i in range(count):
            lib.llama_get_logits_ith(context, i)
    print(json.dumps({"prefill_s": prefill, "steps_s": time.perf_counter() - started}), flush=True)
"""


@dataclass(frozen=True)
class Timing:
    prefill_s: float
    step_s: float


Runner = Callable[[list[list[int]], int], Timing]

# ---------------------------------------------------------------------------- engines


def own_runner(
    decoder: Decoder, kernel: str, slots: int, device: str = "cpu", vocabulary: np.ndarray | None = None
) -> Runner:
    """The engine's forward pass and loop, without a prefix cache. `vocabulary`: the ids that a head of it may draft."""
    forward = choose_forward(decoder, kernel, device=device)
    cache = forward.new_cache(slots, PREFILL_TOKENS + STEPS + 1)

    def run(prompts: list[list[int]], steps: int) -> Timing:
        rows = decode(forward, cache, prompts, steps + 1, stop_ids=frozenset(), vocabulary=vocabulary)
        return Timing(rows[0].prefill_s, rows[0].decode_s / max(1, steps))

    return run


def give_whole_rows(model: Any) -> None:
    """generate() hands the head a slice of the prompts' states; with several rows PyTorch's CPU path then copies the
    whole table for each of them: 50 s for 16 prompts of 100 tokens at the 1.7B shape. Not what is compared here."""
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))


def transformers_runner(model: Any) -> Runner:
    """`generate` as its users call it: greedy, with its cache, no mask needed for prompts of one length."""
    from transformers import StoppingCriteria

    give_whole_rows(model)

    class Clock(StoppingCriteria):
        """Notes when each token is there."""

        def __init__(self):
            self.times_s: list[float] = []

        def __call__(self, input_ids, scores, **_):
            if input_ids.is_cuda:
                torch.cuda.synchronize()
            self.times_s.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def run(prompts: list[list[int]], steps: int) -> Timing:
        ids, clock, count = torch.tensor(prompts, device=model.device), Clock(), steps + 1
        settings = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "use_cache": True}
        started_s = time.perf_counter()
        with torch.inference_mode():
            settings |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "stopping_criteria": [clock]}
            out = model.generate(ids, **settings)
        assert out.shape[1] == ids.shape[1] + count == ids.shape[1] + len(clock.times_s)
        return Timing(clock.times_s[0] - started_s, (clock.times_s[-1] - clock.times_s[0]) / max(1, steps))

    return run


@contextlib.contextmanager
def llama_runner(python: str, path: Path, slots: int, threads: int) -> Iterator[tuple[Runner, str]]:
    """llama.cpp on a GGUF file -> (runner, what it says of its build). ValueError when it cannot be started."""
    command = [python, "-c", LLAMA, str(path), str(threads), str(slots), str(PREFILL_TOKENS + STEPS + 1)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )

    def answer() -> dict[str, Any]:
        line = process.stdout.readline()
        if not line:
            raise ValueError(f"llama.cpp ended with status {process.wait()} on {path.name}")
        return json.loads(line)

    try:
        system = answer()["system"]
        source = np.random.default_rng(1)

        def run(prompts: list[list[int]], steps: int) -> Timing:
            following = source.integers(3, max(map(max, prompts)), (max(1, steps), len(prompts))).tolist()
            process.stdin.write(json.dumps({"prompts": prompts, "steps": steps, "next": following}) + "\n")
            process.stdin.flush()
            found = answer()
            return Timing(found["prefill_s"], found["steps_s"] / max(1, steps))

        yield run, system
    finally:
        process.stdin.close()
        process.kill()
        process.wait()


# ---------------------------------------------------------------------------- the floor


def read_bandwidth(threads: int, device: str = "cpu", size_bytes: int = 1 << 30, runs: int = 5) -> float:
    """Bytes a second that all threads, or the GPU, read in one stream: the best of some runs over a gigabyte."""
    import ctypes

    buffer = torch.ones(size_bytes // 8, dtype=torch.int64, device=device)
    stream = None
    if device == "cpu":
        stream = library().engine_stream
        stream.restype, stream.argtypes = ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    best_s = float("inf")
    for _ in range(runs):
        started_s = time.perf_counter()
        total = stream(buffer.data_ptr(), size_bytes, threads) if stream else int(buffer.sum())
        best_s = min(best_s, time.perf_counter() - started_s)
        assert total == size_bytes // 8
    return size_bytes / best_s


def gemm_rate(device: str = "cpu", size: int = 2048, runs: int = 5) -> float:
    """FLOPs a second of PyTorch's bf16 product of two square matrices: the best of some runs."""
    a, b = (torch.ones(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    best_s = float("inf")
    for _ in range(runs):
        started_s = time.perf_counter()
        float((a @ b)[0, 0])  # a value that is needed: a GPU has then finished
        best_s = min(best_s, time.perf_counter() - started_s)
    return 2 * size**3 / best_s


def step_bytes(decoder: Decoder, batch: int, positions: int, head_rows: int | None = None) -> int:
    """Bytes that one decode step must read: every matrix once, keys and values of each row once; of the head all rows
    of ids that exist, or `head_rows` of them."""
    weights = sum(matrix.size_bytes for layer in decoder.layers for matrix in layer.matrices) + decoder.head.size_bytes
    weights -= round(decoder.head.codes.nbytes * (1 - (head_rows or decoder.num_ids) / decoder.head.shape[0]))
    return weights + batch * positions * decoder.cache_bytes_per_token


# ---------------------------------------------------------------------------- measuring


def measure(
    runners: Mapping[str, Runner], num_ids: int, batches: Sequence[int], rounds: int, progress: Callable[[int], None]
) -> list[dict[str, Any]]:
    """All engines in turn, `rounds` times -> a row an engine and batch: medians, smallest and largest, in ms.

    Batch 1 also times a prefill of 512 tokens.
    """
    source = np.random.default_rng(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return source.integers(3, num_ids, (count, length)).tolist()

    rows = []
    for batch in batches:
        short, long = prompts(batch, PROMPT_TOKENS), prompts(1, PREFILL_TOKENS)
        found: dict[str, list[tuple[float, float | None]]] = {name: [] for name in runners}
        for round_number in range(rounds + 1):
            for name, run in runners.items():
                step_s = run(short, STEPS).step_s
                prefill_s = run(long, 0).prefill_s if batch == 1 else None
                if round_number:  # the first warms up
                    found[name].append((step_s, prefill_s))
                progress(1)
        for name, timings in found.items():
            steps = sorted(1e3 * step for step, _ in timings)
            prefill = [1e3 * one for _, one in timings if one is not None]
            rows.append(
                {
                    "engine": name,
                    "batch": batch,
                    "prompt_tokens": PROMPT_TOKENS,
                    "ms_per_step": round(statistics.median(steps), 3),
                    "min": round(steps[0], 3),
                    "max": round(steps[-1], 3),
                    "runs": rounds,
                    "prefill_ms": round(statistics.median(prefill), 1) if prefill else None,
                }
            )
    return rows


# ---------------------------------------------------------------------------- models


def gguf_file(folder: Path, weights: Mapping[str, Any], config: Mapping[str, Any], kind: str, python: str) -> Path:
    """folder/KIND.gguf, made by llama.cpp's quantizer from bf16 weights when it is missing."""
    from scripts._gguf import quantize_gguf, write_gguf

    path = folder / f"{kind.lower()}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        source, temporary = folder / "source.gguf", folder / f"{kind.lower()}.part"
        if not source.exists():
            write_gguf(made := folder / "source.part", weights, config)
            made.rename(source)
        quantize_gguf(source, kind, temporary, python)
        temporary.rename(path)
    return path


def time_model(
    name: str,
    loaded: Any,
    merged: Any,
    gguf: Mapping[str, Path],
    *,
    python: str | None,
    batches: Sequence[int],
    rounds: int,
    bandwidth: float,
    device: str,
    progress: Callable[[int], None],
) -> list[dict[str, Any]]:
    """Rows of draft.json for one model: every engine, every batch, and the floor."""
    threads, slots = torch.get_num_threads(), max(batches)
    settings = {"num_ids": loaded.num_ids, "positions": min(loaded.context, PREFILL_TOKENS + STEPS + 1)}
    decoder = decoder_of(loaded.model, loaded.tensors, loaded.adapter, **settings)
    with contextlib.ExitStack() as stack:
        runners = {"ours": own_runner(decoder, "native" if device == "cpu" else "plain", slots, device)}
        few = f"ours, {FEW_IDS:,} ids"
        if device == "cpu":
            ids = np.arange(FEW_IDS, dtype=np.int32)
            runners[few] = own_runner(decoder, "native", slots, vocabulary=ids)
            runners["ours-plain"] = own_runner(decoder, "plain", slots)
        runners["transformers"] = transformers_runner(merged.to(device))
        for kind, path in gguf.items():
            runner, system = stack.enter_context(llama_runner(python, path, slots, threads))
            runners[f"llama.cpp-{kind.lower()}"] = runner
            print(f"{name}, llama.cpp {kind}: {system}")
        rows = measure(runners, decoder.num_ids, batches, rounds, progress)
    for row in rows:
        head_rows = FEW_IDS if row["engine"] == few else None
        size = step_bytes(decoder, row["batch"], PROMPT_TOKENS + STEPS // 2, head_rows)
        floor_ms = 1e3 * size / bandwidth
        row |= {"step_bytes": size, "floor_ms_per_step": round(floor_ms, 3)}
    return [{"model": name, **row} for row in rows]
