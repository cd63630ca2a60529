"""Types of the compiled form: those of the reference."""  # noqa: PYI021

from calinix.engines.usage_shapes import usual_counts as usual_counts
