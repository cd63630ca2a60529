"""Calinix: the load balancer for LLM inference pods that knows which pod holds a prompt's prefix."""

__version__ = "0.1.0"
