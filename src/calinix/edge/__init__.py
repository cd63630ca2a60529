"""Bytes and facts: HTTP on both sides, probes. No decisions."""
