"""One operator per file: a public function with its contract. Tensors in, tensors out; nothing waits for the device."""
