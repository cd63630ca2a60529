"""Puts this folder on the import path, so that every test can use kit.py and faultproxy.py."""
