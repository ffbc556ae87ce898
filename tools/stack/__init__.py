"""Puts the product on a cluster, for the demo and for the tests alike: operator, model, service, and a chat with it."""
