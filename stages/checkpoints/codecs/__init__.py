"""The codecs: one file for each kind of packed tensor, how its bytes at rest become the tensor in use."""
