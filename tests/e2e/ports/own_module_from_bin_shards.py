"""A module of one's own, its checkpoint in two .bin files with an index, some of it by single layers on disk."""

import json
from pathlib import Path

import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, hidden):
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


class Tower(nn.Module):
    def __init__(self, width=8, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 4)
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * self.scale


torch.manual_seed(0)
source = Tower()
state = source.state_dict()
names = sorted(state)
files = {name: f"part{index % 2}.bin" for index, name in enumerate(names)}
Path("checkpoint").mkdir()
for file in set(files.values()):
    torch.save({name: state[name] for name in names if files[name] == file}, f"checkpoint/{file}")
Path("checkpoint/weights.index.json").write_text(json.dumps({"weight_map": files}))

with init_empty_weights():
    model = Tower()
device_map = {"blocks.0": "cpu", "blocks.1.up": "disk", "blocks.1.down": "cpu", "blocks.1.norm": "cpu"}
device_map |= {"blocks.2": "disk", "head": "cpu", "scale": "cpu"}
model = load_checkpoint_and_dispatch(model, "checkpoint", device_map=device_map, offload_folder="offload")

inputs = torch.randn(2, 8)
with torch.no_grad():
    output = model(inputs)
print(output.tolist(), torch.equal(output, source(inputs)))
print([tuple(parameter.shape) for parameter in model.parameters()])
