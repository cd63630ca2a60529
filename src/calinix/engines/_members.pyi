"""Types of the compiled form: those of the reference."""  # noqa: PYI021

from calinix.engines.members import Members as Members
from calinix.engines.members import find_members as find_members
