"""What keeps the operator going: queue, leadership, polls of the engines, health and metrics."""
