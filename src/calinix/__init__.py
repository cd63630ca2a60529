"""Calinix: the load balancer for LLM inference pods that knows where a prompt's prefix is."""

__version__ = "0.1.0"
