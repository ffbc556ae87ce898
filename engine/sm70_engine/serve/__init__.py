"""`sm70-serve`: from a request to a supervised vLLM server, or to every reason why not."""
