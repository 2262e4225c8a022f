"""The fleet simulator: simulated engines under the gateway's own routing and index code, in virtual time."""

from loadgen.simulate.fleet import FleetError, FleetSpec, PoolSpec, load_fleet
from loadgen.simulate.load import Load
from loadgen.simulate.simulator import Simulation, simulate

__all__ = ["FleetError", "FleetSpec", "Load", "PoolSpec", "Simulation", "load_fleet", "simulate"]
