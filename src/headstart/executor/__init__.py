"""Runs batches on a device: KV pool, batch to tensors, forward passes, sampling."""
