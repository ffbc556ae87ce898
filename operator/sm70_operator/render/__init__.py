"""From a revision to manifests. Pure: the same revision always renders to the same objects."""
