"""The only folder that imports SGLang.

``plugin`` is the entry point; ``compat`` lists every name of the host that is used and the versions that have it.
"""
