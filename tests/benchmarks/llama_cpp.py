"""Offstage beside llama.cpp on one GGUF file, all of it in memory, on the cpu: in turn, each in a process of its own.

    python -m tests.benchmarks.llama_cpp 1.1b --python /tmp/llama/bin/python
    python -m tests.benchmarks.llama_cpp 1.1b --python /tmp/llama/bin/python --formats q4_k_m --rounds 5
    python -m tests.benchmarks.llama_cpp 7b --python /tmp/llama/bin/python --caps 0.7 0.4
    python -m tests.benchmarks.llama_cpp 1.1b --python /tmp/llama/bin/python --options quantized.compute_dtype=bfloat16

``--python`` is the interpreter of an environment that has llama-cpp-python, which compiles llama.cpp for this machine:

    python3 -m venv /tmp/llama
    CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TOOLS=OFF" /tmp/llama/bin/pip install llama-cpp-python

The file is made of a checkpoint of random weights: in Q8_0 by the ``gguf`` package, and of that in Q4_K_M by llama.cpp.
It has no tokenizer; both sides are given token ids and decode greedily, with as many ``--threads``. Offstage multiplies
by the blocks (``quantized.products=fused``), and is given ``--options`` beside. Prints medians of seconds a token and
of those to the first token of a prompt of 512, the most memory of each process, the ratio, and whether the tokens are
the same: llama.cpp rounds what is multiplied to eight bits first, so they may be others.

With ``--caps`` each side runs in a memory cgroup that holds so much of the file's size at most, libraries and page
cache included, and begins without anything of the file in memory; that needs root. A side that dies is a result too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offstage.stages.units import format_bytes
from tests.benchmarks.caps import drop_page_cache
from tests.benchmarks.checkpoints import SHAPES, make
from tests.benchmarks.gguf_checkpoints import make_gguf
from tests.benchmarks.offload import keep, say
from tests.benchmarks.sides import PROMPT, Setting, in_turn, offstage_record, offstage_side, printed_side

OURS, THEIRS = "offstage", "llama.cpp"
LONG_PROMPT = [5 + at % 997 for at in range(512)]
FORMATS = ("q8_0", "q4_k_m")
_FUSED = "quantized.products=fused"
_SECONDS = 1800.0
"""What a side may take under a cap."""

QUANTIZE = """
import sys, llama_cpp as llama
options = llama.llama_model_quantize_default_params()
options.ftype, options.allow_requantize = llama.LLAMA_FTYPE_MOSTLY_Q4_K_M, True
sys.exit(llama.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), options))
"""

GENERATE = """
import json, sys, time
import llama_cpp as llama, numpy as np
path, tokens, threads, prompts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
llama.llama_backend_init()
options = llama.llama_model_default_params()
options.n_gpu_layers = 0
model = llama.llama_model_load_from_file(path.encode(), options)
words = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
def decode(context, ids):
    given = (llama.llama_token * len(ids))(*ids)  # the batch only points to them
    batch = llama.llama_batch_get_one(given, len(ids))
    assert llama.llama_decode(context, batch) == 0
    return int(np.ctypeslib.as_array(llama.llama_get_logits_ith(context, -1), (words,)).argmax())
def answer(prompt, count):
    options = llama.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 1024
    options.n_threads = options.n_threads_batch = threads
    context = llama.llama_init_from_model(model, options)
    began = time.perf_counter()
    found, times = [decode(context, prompt)], [time.perf_counter()]
    while len(found) < count:
        found.append(decode(context, found[-1:]))
        times.append(time.perf_counter())
    llama.llama_free(context)
    return found, times[0] - began, (times[-1] - times[0]) / max(1, count - 1)
found, _, seconds = answer(prompts[0], tokens)
_, first, _ = answer(prompts[1], 1)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
peak = int(status["VmHWM"].split()[0]) * 1024  # rusage has what was in this process before, the benchmark's own too
print(json.dumps({"seconds": seconds, "first": first, "peak": peak, "tokens": found}))
"""

Side = Mapping[str, Any]


def main() -> None:
    """Run the rounds of each format and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("--python", required=True, help="the interpreter of an environment with llama-cpp-python")
    parser.add_argument("--formats", nargs="*", choices=FORMATS, default=FORMATS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=17)
    parser.add_argument("--options", nargs="*", default=[], help="what offstage is told beside, as on its command line")
    parser.add_argument("--caps", nargs="*", type=float, help="hard caps, each a part of the file's size; none: no cap")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-bench"))
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    first = make_gguf(make(arguments.size, folder / arguments.size), folder / f"{arguments.size}-gguf")
    for kind in arguments.formats:
        file = first if kind == "q8_0" else first.with_name(f"{kind}.gguf")
        if not file.exists():
            _run([arguments.python, "-c", QUANTIZE, str(first), str(file)])
        for part in arguments.caps or [None]:
            _compare(kind, file, folder, arguments, part=part)


def _compare(kind: str, file: Path, folder: Path, arguments: argparse.Namespace, *, part: float | None) -> None:
    """Run the rounds with one file, under a cap of that ``part`` of it or with what memory there is, and print them."""
    rounds: list[dict[str, Side]] = []
    name = f"results-llama-cpp-{arguments.size}-{kind}" + ("" if part is None else f"-{part}")
    for number in range(arguments.rounds):
        sides = in_turn([OURS, THEIRS], number)
        if part is None:
            rounds.append({side: _side(side, file, folder, arguments) for side in sides})
        else:
            cap = int(part * file.stat().st_size)
            rounds.append({side: _capped_side(side, file, folder, arguments, cap=cap) for side in sides})
        keep(folder / f"{name}.json", arguments, rounds)
    for line in lines(kind, rounds) if part is None else capped_lines(kind, part, rounds):
        say(line)


def _side(name: str, file: Path, folder: Path, arguments: argparse.Namespace) -> Side:
    """Run one side and return what it told."""
    if name == THEIRS:
        asked = [str(arguments.tokens), str(arguments.threads), json.dumps([PROMPT, LONG_PROMPT])]
        side: Side = json.loads(_run([arguments.python, "-c", GENERATE, str(file), *asked]).splitlines()[-1])
    else:
        options, work = [_FUSED, "device_map=cpu", *arguments.options], folder / "llama-cpp"
        short = offstage_record(file, work, tokens=arguments.tokens, options=options)
        asked = [f"generate.prompts=[{LONG_PROMPT}]", "generate.max_new_tokens=1", "generate.min_new_tokens=1"]
        long = offstage_record(file, work, tokens=1, options=[*options, *asked])
        side = {
            "seconds": short["metrics"]["decode_seconds_per_token"],
            "first": long["metrics"]["time_to_first_token_seconds"],
            "peak": max(record["metrics"]["peak_host_bytes"] for record in (short, long)),
            "tokens": short["outputs"][0]["token_ids"],
        }
    say(f"{name:9} {side['seconds']:.3f} s a token, {side['first']:.2f} s to the first of {len(LONG_PROMPT)}")
    return side


def _capped_side(name: str, file: Path, folder: Path, arguments: argparse.Namespace, *, cap: int) -> Side:
    """Run one side under a ``cap`` in bytes and return what it told; ``seconds`` are null where it died."""
    work = folder / "llama-cpp"
    work.mkdir(parents=True, exist_ok=True)
    setting = Setting(file, work, cap, arguments.tokens, _SECONDS)
    drop_page_cache()
    if name == THEIRS:
        asked = [str(arguments.tokens), str(arguments.threads), json.dumps([PROMPT, PROMPT])]
        side = printed_side(setting, [arguments.python, "-c", GENERATE, str(file), *asked])
    else:
        side = offstage_side(setting, [_FUSED, *arguments.options])
    outcome = f"{side['seconds']:.3f} s a token" if side["seconds"] is not None else side["failed"]
    say(f"{name:9} under {format_bytes(cap)}: {outcome}")
    return side


def capped_lines(kind: str, part: float, rounds: Sequence[Mapping[str, Side]]) -> list[str]:
    """Return the lines of a table: medians of both sides under one cap, and how much longer llama.cpp took."""
    times = {name: [one[name]["seconds"] for one in rounds] for name in (OURS, THEIRS)}
    rows = [f"{kind} under a cap of {part} of the file, s a token"]
    for name, each in times.items():
        rows.append(f"{name:9}  {'died' if None in each else format(statistics.median(each), '.3f')}")
    if None not in (*times[OURS], *times[THEIRS]):
        rows.append(
            f"{'ratio':9}  {statistics.median(times[THEIRS]) / statistics.median(times[OURS]):.2f} times as fast"
        )
    return rows


def lines(kind: str, rounds: Sequence[Mapping[str, Side]]) -> list[str]:
    """Return the lines of a table: medians of both sides, ratios, and whether the tokens are the same."""
    rows, medians = [f"{kind:9}  s a token  s to first      peak"], {}
    for name in (OURS, THEIRS):
        each = {what: statistics.median(one[name][what] for one in rounds) for what in ("seconds", "first", "peak")}
        medians[name] = each
        rows.append(f"{name:9}  {each['seconds']:9.3f}  {each['first']:10.2f}  {format_bytes(int(each['peak'])):>8}")
    ratios = [medians[OURS][what] / medians[THEIRS][what] for what in ("seconds", "first", "peak")]
    rows.append(f"{'ratio':9}  {ratios[0]:9.2f}  {ratios[1]:10.2f}  {ratios[2]:8.2f}")
    same = all(one[OURS]["tokens"] == one[THEIRS]["tokens"] for one in rounds)
    return [*rows, f"the tokens are {'the same' if same else 'others'}"]


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"llama.cpp failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
