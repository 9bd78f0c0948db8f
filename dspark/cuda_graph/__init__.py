"""Captured shapes: how many rows a step may run."""
