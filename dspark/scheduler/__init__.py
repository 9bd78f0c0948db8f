"""How many drafts to verify: pure functions on NumPy values; no device, clock or log. ``planner.py`` is read first."""
