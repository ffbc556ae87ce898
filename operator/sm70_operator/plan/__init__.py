"""What to do and what to say: pure functions of a snapshot and the time. No I/O, no clock, no Kubernetes client."""
