from .accelerate_api.align import AlignDevicesHook as AlignDevicesHook
from .accelerate_api.attach import (
    attach_align_device_hook as attach_align_device_hook,
    attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
    attach_execution_device_hook as attach_execution_device_hook,
)
from .accelerate_api.cpu_offload_hook import (
    CpuOffload as CpuOffload,
    UserCpuOffloadHook as UserCpuOffloadHook,
    cpu_offload_with_hook as cpu_offload_with_hook,
)
from .accelerate_api.dispatch_model import (
    cpu_offload as cpu_offload,
    disk_offload as disk_offload,
    dispatch_model as dispatch_model,
    load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
)
from .accelerate_api.hooks import (
    ModelHook as ModelHook,
    SequentialHook as SequentialHook,
    add_hook_to_module as add_hook_to_module,
    remove_hook_from_module as remove_hook_from_module,
    remove_hook_from_submodules as remove_hook_from_submodules,
)
from .accelerate_api.offload_budget import OffloadBudget as OffloadBudget, maybe_offload_to_cpu as maybe_offload_to_cpu
from .accelerate_api.offloaded_params import (
    align_module_device as align_module_device,
    get_state_dict_from_offload as get_state_dict_from_offload,
    get_state_dict_offloaded_model as get_state_dict_offloaded_model,
    has_offloaded_params as has_offloaded_params,
)
from .answers import Generation as Generation, Score as Score
from .dispatch_plan import DispatchPlan as DispatchPlan, make_dispatch_plan as make_dispatch_plan
from .from_pretrained import from_pretrained as from_pretrained
from .loaded_model import LoadedModel as LoadedModel, load as load
from .streaming.streamer import Streamer as Streamer, lockstep as lockstep
from .transfer.values import send_to_device as send_to_device
