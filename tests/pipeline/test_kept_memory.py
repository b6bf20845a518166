"""Libraries keep little: in processes of their own, since an allocator can't be set back and caches look once."""

import subprocess
import sys
from pathlib import Path

import pytest

from offstage.pipeline.kept_memory import CAPACITY, WITHOUT_CUDNN_ATTENTION, bound_kernel_caches

CODE = """
import re
from pathlib import Path
import torch
from offstage.pipeline.kept_memory import bound_kernel_caches

def held():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def multiply(lengths):
    for length in lengths:
        torch.zeros(8, 1, 64, dtype=torch.bfloat16) @ torch.zeros(8, 64, length, dtype=torch.bfloat16)

bound_kernel_caches()
multiply(range(8, 40))
before = held()
multiply(range(40, 160))
print(held() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system what is held")
def test_products_of_ever_other_shapes_dont_make_the_process_grow() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 30e6, "0.66 MB for each of 120 shapes where oneDNN compiles them"


def test_what_the_environment_says_counts() -> None:
    nothing: dict[str, str] = {}
    bound_kernel_caches(nothing)
    assert nothing.pop(WITHOUT_CUDNN_ATTENTION) == "1"
    assert list(nothing.values()) == [str(CAPACITY)] * 2
    mine = {WITHOUT_CUDNN_ATTENTION: "0", "LRU_CACHE_CAPACITY": "7", "DNNL_PRIMITIVE_CACHE_CAPACITY": "9"}
    asked = dict(mine)
    bound_kernel_caches(asked)
    assert asked == mine


FREES = """
import re, sys
from pathlib import Path
from offstage.pipeline.kept_memory import return_freed_memory

def held():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

if "set" in sys.argv:
    assert return_freed_memory()
for _ in range(2):  # by default a first free raises the size up to which blocks are kept
    blocks = [bytearray(b"x") * 12_000_000 for _ in range(12)]
    pins = [bytearray(100_000) for _ in range(3)]
    before = held()
    del blocks
print(before - held())
"""


def given_back(*arguments: str) -> int:
    done = subprocess.run([sys.executable, "-c", FREES, *arguments], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the C library's own setting")
def test_what_is_freed_is_given_back() -> None:
    assert given_back("set") > 0.95 * 144_000_000


DECODES = """
import re, resource, sys
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import offstage

def held():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

shape = {"hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8}
folder = sys.argv[1]
LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=1024, **shape)).save_pretrained(folder)
model, before = offstage.load(folder, cache=f"{folder}/cache").model, []
with torch.no_grad():
    model(input_ids=torch.ones(1, 640, dtype=torch.long), logits_to_keep=1)
    base = held()
    cache = model(input_ids=torch.ones(1, 640, dtype=torch.long), logits_to_keep=1).past_key_values
    for token in range(12):
        before.append(faults())
        cache = model(input_ids=torch.ones(1, 1, dtype=torch.long), past_key_values=cache).past_key_values
    keys = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    del cache
    model(input_ids=torch.ones(1, 17, dtype=torch.long), logits_to_keep=1)
print((before[-1] - before[4]) / 7 * 4096 / keys, (held() - base) / keys)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library's own setting")
def test_tokens_take_the_memory_again_that_the_one_before_freed_and_a_prompt_gives_it_back(tmp_path: Path) -> None:
    """Of 10 MB of keys and values each token makes all anew."""
    done = subprocess.run([sys.executable, "-c", DECODES, str(tmp_path)], capture_output=True, text=True, check=True)
    paged, kept = map(float, done.stdout.splitlines()[-1].split())
    assert paged < 0.2, "pages of new memory a token, by the bytes of the cache"
    assert kept < 0.3, "what stays in memory of the cache, by its bytes"


HEAP = """
import resource, sys
from offstage.pipeline.kept_memory import return_freed_memory, take_again

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        bytearray(b"x") * 3_000_000
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * 4096 / 150_000_000

take_again(True, decodes=True)
assert return_freed_memory()
back = faults()
take_again(True, decodes=False)
print(back, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library's own setting")
def test_freed_blocks_are_taken_again_or_given_back_as_it_is_said() -> None:
    done = subprocess.run([sys.executable, "-c", HEAP], capture_output=True, text=True, check=True)
    back, again = map(float, done.stdout.split())
    assert back > 0.9, "new pages for each"
    assert again < 0.1
