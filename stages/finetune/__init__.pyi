from .cpu_offload import CPUOffload as CPUOffload
from .memory_profile import least_ratio as least_ratio, profile_memory as profile_memory
from .module_profile import MemoryProfile as MemoryProfile
