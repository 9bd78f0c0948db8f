"""The decode step and what it keeps count of; speaks to the host only through the protocols of ``protocols.py``."""
