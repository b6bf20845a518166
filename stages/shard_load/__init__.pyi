from .functions import (
    load_checkpoint_in_model as load_checkpoint_in_model,
    load_state_dict as load_state_dict,
    set_module_tensor_to_device as set_module_tensor_to_device,
)
from .offload_folder import (
    OffloadedWeightsLoader as OffloadedWeightsLoader,
    PrefixedDataset as PrefixedDataset,
    load_offloaded_weight as load_offloaded_weight,
    offload_state_dict as offload_state_dict,
    offload_weight as offload_weight,
    save_offload_index as save_offload_index,
)
from .place import PlacedWeights as PlacedWeights
