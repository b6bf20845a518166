"""The tests; ``python -m tests`` runs all the checks there are."""
