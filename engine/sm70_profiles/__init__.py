"""The contract: what to serve, what must be fast, and every refusal, as data."""
