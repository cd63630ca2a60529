"""The compiled part."""
