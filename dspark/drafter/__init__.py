"""The block drafter: checkpoint formats, heads, proposal."""
