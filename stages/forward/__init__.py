"""In generate's place: one forward of any model over given inputs, its outputs by name."""
