"""Three models take turns: each comes when it is called, and goes when the next one is."""

import torch
from accelerate import cpu_offload_with_hook
from torch import nn

torch.manual_seed(0)
encoder, denoiser, decoder = (nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3))
encoder, hook_1 = cpu_offload_with_hook(encoder, torch.device("cpu"))
denoiser, hook_2 = cpu_offload_with_hook(denoiser, torch.device("cpu"), prev_module_hook=hook_1)
decoder, hook_3 = cpu_offload_with_hook(decoder, torch.device("cpu"), prev_module_hook=hook_2)

with torch.no_grad():
    hidden = encoder(torch.ones(2, 6))
    for _ in range(10):
        hidden = denoiser(hidden)
    image = decoder(hidden)
hook_3.offload()
print(image.tolist())
print([next(model.parameters()).device for model in (encoder, denoiser, decoder)])

for hook in (hook_1, hook_2, hook_3):
    hook.remove()
print([hasattr(model, "_hf_hook") for model in (encoder, denoiser, decoder)])
print(torch.equal(decoder(hidden), image))
