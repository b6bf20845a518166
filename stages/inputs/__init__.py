"""What a model is given beside text: images, audio, tensors from files, each read within bounds; and what together."""
