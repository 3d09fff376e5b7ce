"""The decode worker's scheduler: the home of a request and of its KV."""
