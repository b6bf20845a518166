"""The five stages of the pipeline and the functions that they are made of."""
