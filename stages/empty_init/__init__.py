"""The first stage: the model without its weights, and what a rehearsal of it shows."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
