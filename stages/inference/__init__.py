"""What the stages that run a model have in common: texts as tokens, padded batches, results as they finish, costs."""
