"""What may run, what did run, and the report of both."""
