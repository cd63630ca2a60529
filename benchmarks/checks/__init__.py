"""The checks of `make accept`, by what they need: a clone, a test suite, figures, real engines."""
