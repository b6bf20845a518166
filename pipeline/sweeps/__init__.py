"""Sweeps: their jobs, what runs these, what came of them, and searches that decide on the next job by it."""
