"""Whether a prompt is worth a prefill pod: which decode pods had better serve a request whole."""

from __future__ import annotations

from calinix.core.bitmap import HostBitmap
from calinix.core.prepare import Prompt
from calinix.core.state import State


def whole_on(state: State, prompt: Prompt) -> HostBitmap:
    """The decode pods that are to serve this prompt without a prefill pod; 0: it is split.

    Those that would have to compute at most `prefillThreshold` tokens of it: it is short, or they
    hold its prefix. Moving so little KV between pods costs more than computing it where it is
    needed. This is the one place that decides it: a strategy that predicts both ways in seconds
    compares them here.
    """
    table, threshold = state.table, state.prefill_threshold
    decode = table.roles["decode"]
    if prompt.tokens <= threshold:
        return decode
    lacking = (prompt.tokens - threshold) / prompt.block_tokens
    if not prompt.blocks or lacking > prompt.cap_blocks:
        return 0
    among = table.slot_set(decode & ~state.health.silent)
    depths, deepest = state.registry.held(prompt.chain, among.slots)
    if depths is None or deepest < lacking:
        return 0
    trusts = state.calibration.trusts(among.slots) if state.calibration.doubted & decode else None
    members = 0
    for place, slot in enumerate(among.slots):
        if depths[place] * (1.0 if trusts is None else trusts[place]) >= lacking:
            members |= 1 << slot
    return members
