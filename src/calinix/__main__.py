"""`python -m calinix`: the same as the command `calinix`."""

from __future__ import annotations

from calinix.cli import main

main()
