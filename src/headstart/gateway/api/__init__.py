"""OpenAI's HTTP API over the dispatcher."""
