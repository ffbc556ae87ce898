"""Fixtures for every test: the session's cluster."""

pytest_plugins = ["testcluster.fixtures"]
