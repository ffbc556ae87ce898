"""The faces that vLLM sees, each thin: platform, worker, endpoints, metrics, registrations."""
