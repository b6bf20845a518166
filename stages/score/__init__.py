"""In generate's place: how likely a model finds texts, token by token, and its perplexity."""
