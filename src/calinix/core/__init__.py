"""The pure part: which pod serves a request. No I/O, clock, global rng or logging."""
