"""The vLLM plugin that turns stock vLLM into an SM70 server."""
