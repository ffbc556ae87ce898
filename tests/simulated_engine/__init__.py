"""A simulated engine: what `sm70-serve` looks like from outside, without a model, and with faults on demand.

Endpoints, documents and series are those of the real engine, made by the same types; answers are the reciting model's.
It computes nothing, and whatever is measured on it says nothing about an engine. `behaviour.py` lists its faults.
"""
