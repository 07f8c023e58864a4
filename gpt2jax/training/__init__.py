"""Objective, optimizer, step, loop, checkpoints and metrics."""
