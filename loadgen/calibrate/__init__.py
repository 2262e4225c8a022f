"""Fits a latency model to a live engine."""

from loadgen.calibrate.fit import Calibration, DecodePoint, PrefillPoint, fit
from loadgen.calibrate.probe import CalibrationError, ProbeOptions, measure

__all__ = ["Calibration", "CalibrationError", "DecodePoint", "PrefillPoint", "ProbeOptions", "fit", "measure"]
