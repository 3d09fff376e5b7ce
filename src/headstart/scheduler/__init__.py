"""Decode and prefill schedulers: pure, torch-free state machines over kv and the transfer contract."""
