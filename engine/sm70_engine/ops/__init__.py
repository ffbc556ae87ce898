"""Operators, one module a family: the torch custom op, its plain reference, and its dispatch."""
