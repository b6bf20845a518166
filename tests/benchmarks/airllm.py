"""AirLLM as a side of a benchmark: its folder, its one-time conversion, and a generation under a cap.

It wants an interpreter of its own, since scipy and sentencepiece, which it imports, are none of ours. This worked, with
AirLLM 4.0.0, scipy 1.17.1 and sentencepiece 0.2.3 beside our own torch 2.13, transformers 5.23 and accelerate 1.15:

    python3 -m venv /tmp/airllm
    echo "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \\
        > "$(/tmp/airllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ours.pth"
    /tmp/airllm/bin/pip install --no-deps airllm==4.0.0 scipy==1.17.1 sentencepiece==0.2.3

The second line lends it the packages of our environment; without it, ``pip install airllm==4.0.0`` fetches all its own.

It runs on the cpu with ``device="cpu"``; the dtype is the checkpoint's, reading one layer ahead its default. It takes
only shards that are named as on the Hub (``model-00001-of-00005.safetensors``) and a folder with a tokenizer, so it
gets a folder of links with both. Before the first run it writes each layer into a file of its own: the whole checkpoint
once more. That is done outside the cap and outside the time that is measured, and said apart.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

INDEX = "model.safetensors.index.json"

CONVERT = """
import json, sys, time
from airllm import AutoModel
began = time.perf_counter()
AutoModel.from_pretrained(sys.argv[1], device="cpu", layer_shards_saving_path=sys.argv[1] + "/layers")
print(json.dumps({"seconds": time.perf_counter() - began}))
"""

GENERATE = """
import json, sys, time, torch
from airllm import AutoModel
from transformers import StoppingCriteria, StoppingCriteriaList
folder, tokens, prompt = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
model = AutoModel.from_pretrained(folder, device="cpu", layer_shards_saving_path=folder + "/layers")
times = []
class Clock(StoppingCriteria):
    def __call__(self, ids, scores, **kwargs):
        times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)
ids = torch.tensor([prompt])
out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                     do_sample=False, stopping_criteria=StoppingCriteriaList([Clock()]))
print(json.dumps({"seconds": (times[-1] - times[0]) / (len(times) - 1), "tokens": out[0, ids.shape[1]:].tolist()}))
"""


def convert(checkpoint: Path, folder: Path, python: str) -> float:
    """Make ``folder`` what AirLLM, run by ``python``, generates from; return the seconds that its conversion took."""
    shutil.rmtree(folder, ignore_errors=True)
    _link(checkpoint.resolve(), folder)
    done = subprocess.run([python, "-c", CONVERT, str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"AirLLM couldn't convert {checkpoint}: {done.stderr.strip()[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def command(folder: Path, python: str, *, tokens: int, prompt: list[int]) -> list[str]:
    """Return the command that generates from the converted ``folder`` and prints seconds a token and the tokens."""
    return [python, "-c", GENERATE, str(folder), str(tokens), json.dumps(prompt)]


def _link(checkpoint: Path, folder: Path) -> None:
    """Make ``folder`` links to the files of ``checkpoint``, named as AirLLM takes them, with a tokenizer beside."""
    folder.mkdir(parents=True)
    folder.joinpath("config.json").symlink_to(checkpoint / "config.json")
    weight_map = json.loads(checkpoint.joinpath(INDEX).read_text())["weight_map"]
    files = sorted(set(weight_map.values()))
    names = {file: f"model-{number:05}-of-{len(files):05}.safetensors" for number, file in enumerate(files, 1)}
    for file, name in names.items():
        folder.joinpath(name).symlink_to(checkpoint / file)
    renamed = {tensor: names[file] for tensor, file in weight_map.items()}
    folder.joinpath(INDEX).write_text(json.dumps({"weight_map": renamed}))
    words = Tokenizer(models.WordLevel({"word": 0}, "word"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="word").save_pretrained(folder)
