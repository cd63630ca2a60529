"""Pods that are models: the mock pod and its load generator."""
