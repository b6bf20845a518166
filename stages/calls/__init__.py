"""One call of any model's forward: arguments by name in, tensors by name out. What is called is what is rehearsed."""
