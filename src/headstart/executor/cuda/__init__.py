"""Runs batches on a CUDA card: decode steps as captured graphs, two steps in flight, sampling on the card."""
