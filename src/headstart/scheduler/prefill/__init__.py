"""The prefill worker's scheduler: turns prompts into KV pages and sends them to the decode worker that called."""
