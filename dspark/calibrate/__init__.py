"""``python -m dspark calibrate``: temperatures of the confidence head, fitted to a server's own text."""
