"""Training: what the forward pass saves for the backward pass waits on the host or on disk until it is wanted."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
