"""Maps are made for accelerators that aren't here: what is asked of them, not which of the right ones it is."""

from collections import Counter

from accelerate import infer_auto_device_map, init_empty_weights
from accelerate.utils import check_device_map, compute_module_sizes, get_balanced_memory, get_max_memory
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=4)
with init_empty_weights():
    model = LlamaForCausalLM(config)
sizes = compute_module_sizes(model)
print(sizes[""], sizes["model.layers.0"], sizes["model.layers.0.mlp.gate_proj"])


def bytes_by_device(device_map):
    """Return the bytes on each device; no two entries of a map lie one in the other."""
    bytes_on = Counter()
    for name, device in device_map.items():
        bytes_on[device] += sizes[name]
    return bytes_on


budgets = {0: "150kB", 1: "200KiB", "cpu": "1MB"}
print(get_max_memory(budgets))
device_map = infer_auto_device_map(model, max_memory=budgets, no_split_module_classes=["LlamaDecoderLayer"])
check_device_map(model, device_map)
print(all(count <= get_max_memory(budgets)[device] for device, count in bytes_by_device(device_map).items()))
print([f"model.layers.{index}" in device_map for index in range(6)])

balanced = get_balanced_memory(
    model, max_memory={0: "1MB", 1: "1MB", 2: "1MB"}, no_split_module_classes=["LlamaDecoderLayer"]
)
device_map = infer_auto_device_map(model, max_memory=balanced, no_split_module_classes=["LlamaDecoderLayer"])
print(sorted(balanced), sorted(bytes_by_device(device_map)))

print(dict(infer_auto_device_map(model, max_memory={"cpu": "10MB"})))
print(dict(infer_auto_device_map(model, max_memory={0: "10MB"}, dtype="float16")))
