"""One operator per file: a public function with its contract, and (from the CUDA-graph milestone on) a Triton kernel."""
