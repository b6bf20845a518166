from .functions import (
    calculate_maximum_sizes as calculate_maximum_sizes,
    check_device_map as check_device_map,
    clean_device_map as clean_device_map,
    compute_module_sizes as compute_module_sizes,
    get_balanced_memory as get_balanced_memory,
    get_max_layer_size as get_max_layer_size,
    get_max_memory as get_max_memory,
    infer_auto_device_map as infer_auto_device_map,
)
from .plan import Plan as Plan
