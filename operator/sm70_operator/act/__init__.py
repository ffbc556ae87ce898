"""The only room that changes the world: requests to the API server, each idempotent and guarded."""
