"""Train state, optimiser, steps, loop, checkpoints, metrics."""
