"""Counters, online calibration, the ceiling under trimming, records: NumPy on values that the host already has."""
