"""The runner: it takes a config through the stages, caches what they leave, and records the run."""
