"""The judge: an HTTP client that measures a running endpoint."""
