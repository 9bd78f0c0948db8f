"""Python runs this at its start where ``benchmarks.host_loop`` puts this folder on the path: in servers."""

from benchmarks.host_loop import watch

watch()
