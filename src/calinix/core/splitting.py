"""Whether a prompt is worth a prefill pod: which decode pods had better serve a request whole."""

from __future__ import annotations

from calinix.core.bitmap import HostBitmap
from calinix.core.choice import Choice
from calinix.core.prepare import Prompt
from calinix.core.state import State

TRY_S = 60.0
"""A way that none went for so long is gone once, so that its seconds are measured ones."""
TRY_TOKENS = 2048.0
"""But no longer prompt is sent to a decode pod for that: it would hold up many answers."""


def whole_on(state: State, prompt: Prompt) -> HostBitmap:
    """The decode pods that are to serve this prompt without a prefill pod; 0: it is split.

    Those that would have to compute at most `prefillThreshold` tokens of it: it is short, or they
    hold its prefix. Moving so little KV between pods costs more than computing it where it is
    needed. A strategy that predicts seconds then compares both ways (`is_whole_better`).
    """
    table, threshold = state.table, state.prefill_threshold
    decode = table.roles["decode"]
    if prompt.tokens <= threshold:
        return decode
    if not prompt.blocks:
        return 0
    lacking = (prompt.tokens - threshold) / prompt.block_tokens
    if lacking > prompt.cap_blocks:
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


def seconds(choice: Choice) -> float | None:
    """What the choice costs; None where candidates are not compared by seconds."""
    scores = choice.weighed() if choice.by_seconds else None
    return None if scores is None else -float(scores[choice.index])


def is_whole_better(state: State, whole: Choice, first: Choice, second: Choice, now: float) -> bool:
    """Whether a prompt had better go to a decode pod alone than by a prefill pod (`first`) to one.

    Notes in both choices of a decode pod what the other way would have cost.
    """
    alone, prefill, decode = seconds(whole), seconds(first), seconds(second)
    if alone is None or prefill is None or decode is None:
        return True
    whole.other_way_s, second.other_way_s = prefill + decode, alone
    if now - state.whole_s > TRY_S and whole.tokens <= TRY_TOKENS:
        is_better = True
    elif now - state.split_s > TRY_S:
        is_better = False
    else:
        is_better = alone <= prefill + decode
    if is_better:
        state.whole_s = now
    else:
        state.split_s = now
    return is_better
