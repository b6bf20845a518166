"""A model over several hosts: which one computes what, and what passes between them."""
