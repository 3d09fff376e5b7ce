"""Where weights come from: folders, GGUF files and random weights; the attention hook of the model library."""
