"""The fourth stage: hooks that bring each weight to where it computes, when it is needed."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
