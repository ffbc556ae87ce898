"""`make demo`: from a bare machine to a token that a Kubernetes resource served."""
