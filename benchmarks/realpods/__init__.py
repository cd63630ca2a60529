"""Real vLLM pods on this machine's CPU, and what must hold of the gateway before them."""
