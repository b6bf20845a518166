from .aligning import AlignDevicesHook as AlignDevicesHook
from .attaching import (
    attach_align_device_hook as attach_align_device_hook,
    attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
    attach_execution_device_hook as attach_execution_device_hook,
)
from .budget_offload import OffloadBudget as OffloadBudget, maybe_offload_to_cpu as maybe_offload_to_cpu
from .hooks import (
    ModelHook as ModelHook,
    SequentialHook as SequentialHook,
    add_hook_to_module as add_hook_to_module,
    remove_hook_from_module as remove_hook_from_module,
    remove_hook_from_submodules as remove_hook_from_submodules,
)
from .host_offload import (
    CpuOffload as CpuOffload,
    UserCpuOffloadHook as UserCpuOffloadHook,
    cpu_offload_with_hook as cpu_offload_with_hook,
)
from .moving import send_to_device as send_to_device
from .score import Score as Score, write_score as write_score
from .streaming import Streamer as Streamer
from .whole_model import (
    cpu_offload as cpu_offload,
    disk_offload as disk_offload,
    dispatch_model as dispatch_model,
    load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
)
