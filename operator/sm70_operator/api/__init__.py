"""The public face: types of the custom resource, conditions, names and hashes. Pure; imports no Kubernetes client."""
