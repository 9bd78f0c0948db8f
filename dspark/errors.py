"""Every error that the package raises on purpose.

A message says what was found, what is required and what to do, in that order.
"""


class DSparkError(Exception):
    """Base of all errors of this package."""


class ConfigError(DSparkError, ValueError):
    """A flag, environment variable or request field has a value that cannot be used."""


class CheckpointError(DSparkError, ValueError):
    """A draft checkpoint is missing, incomplete or contradicts itself."""


class HostError(DSparkError, RuntimeError):
    """The installed SGLang, or this machine, cannot run the plugin."""


class CostTableError(DSparkError, ValueError):
    """A cost table or calibration file cannot be used for this deployment."""
