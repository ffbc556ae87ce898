"""Quantisation configurations and methods for vLLM."""
