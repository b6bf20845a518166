"""What is asked of a model, and what that takes beside weights: prompts, texts to score, images and audio."""
