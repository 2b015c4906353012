"""The transport of a simulation: all clients are trained on this machine."""

from oneround.simulate.simulation import run

__all__ = ["run"]
