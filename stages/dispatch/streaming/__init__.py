"""The engine: offloaded weights are there when a module is called, ahead of use, and let go after it."""
