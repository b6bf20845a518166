"""The last stage: prompts in, tokens and texts out."""
