"""How the container images are built where there is no Docker: recipes and keys, buildah, OCI archives."""
