"""The kopf operator for Sm70InferenceService."""
