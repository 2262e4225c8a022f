"""Sweeps: many configurations of a fleet, simulated or live, one results file."""
