"""The scenarios of `calinix bench`: what deciding costs, and what comes of it on busy pods."""
