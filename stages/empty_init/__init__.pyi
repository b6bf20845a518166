from .describe import describe as describe
from .init import init_empty_weights as init_empty_weights, init_on_device as init_on_device
from .rehearsal import rehearse as rehearse
from .skeleton import Skeleton as Skeleton
from .tied import (
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    find_tied_parameters as find_tied_parameters,
    named_module_tensors as named_module_tensors,
    retie_parameters as retie_parameters,
)
