"""Attention backends for vLLM."""
