"""The functions and hooks that scripts written against accelerate know, on the engine of ``streaming``."""
