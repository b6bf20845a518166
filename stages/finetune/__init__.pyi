from .cpu_offload import CPUOffload as CPUOffload
