"""A pretrained body gets a new head, and both are trained: what the checkpoint lacks stays as it was made."""

import torch
from accelerate import load_checkpoint_in_model
from safetensors.torch import save_file
from torch import nn


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12))
        self.head = nn.Linear(12, classes)

    def forward(self, inputs):
        return self.head(self.body(inputs))


torch.manual_seed(0)
pretrained = Classifier(classes=10)
save_file(pretrained.body.state_dict(), "body.safetensors", metadata={"format": "pt"})
save_file(
    {f"body.{name}": value for name, value in pretrained.body.state_dict().items()} | {"pooler": torch.ones(2)},
    "model.safetensors",
    metadata={"format": "pt"},
)

model = Classifier(classes=3)
model.body[0].bias.requires_grad_(False)
load_checkpoint_in_model(model, "model.safetensors")
print(torch.equal(model.body[2].weight, pretrained.body[2].weight))
print({name: parameter.requires_grad for name, parameter in model.named_parameters()})

inputs, labels = torch.randn(16, 6), torch.randint(3, (16,))
optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    print(loss.item())
print([torch.equal(model.body[index].weight, pretrained.body[index].weight) for index in (0, 2)])

half = Classifier(classes=3)
load_checkpoint_in_model(half, "model.safetensors", device_map={"": "cpu"}, dtype=torch.float16)
print(half.body[0].weight.dtype)
try:
    load_checkpoint_in_model(Classifier(classes=3), "model.safetensors", strict=True)
except (ValueError, RuntimeError):
    print("refused when strict")
