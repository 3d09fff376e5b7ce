"""Text in and out: tokenizer, chat template, incremental detokenisation, stop strings. Free of torch and transformers."""
