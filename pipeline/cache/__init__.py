"""The artifact cache: how a value becomes a key, and how an artifact is published under it."""
