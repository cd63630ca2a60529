"""The HTTP host that drives the Router."""
