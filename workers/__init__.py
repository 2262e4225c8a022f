"""The fleet: engine profiles, latency models, registry, monitor, and the simulated engine."""
