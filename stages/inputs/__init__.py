"""What a model is given beside text: images, audio and tensors from files, each read within bounds."""
