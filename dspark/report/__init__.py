"""``python -m dspark report``: what a server did, as one HTML page that needs nothing else."""
