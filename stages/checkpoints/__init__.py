"""What a checkpoint is: Hub ids, formats, headers, extents, files read directly or mapped."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
