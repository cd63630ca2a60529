"""How well each pod is predicted: cached tokens and times to first token, said and found.

Errors are exponential means with counts. Where a pod does not hold what it is believed to hold, its
trust falls: the factor in [0, 1] by which its matched depths count.

The rule. Of the tokens believed cached, the share that the pod turns out not to have (its *lack*)
is averaged with forgetting, KEEP per request, each request weighing as much as its tokens. Once it
rests on LEAST_SAMPLES requests and passes DOUBT, the pod is doubted, and its trust is 1 - lack.
When the lack is back under BELIEVE, the trust is 1 again. Without any evidence doubt fades, by half
in FADE_S, so that a pod to which nobody is sent any more is tried again.
"""

from __future__ import annotations

from array import array
from typing import Final

from calinix.core.bitmap import HostBitmap
from calinix.core.columns import Slots, Values

KEEP: Final = 0.95
"""Weight of the past at each request."""
LEAST_SAMPLES: Final = 16
"""Requests that a doubt rests on."""
DOUBT: Final = 0.3
"""The lack from which on a pod is doubted."""
BELIEVE: Final = 0.15
"""The lack under which it is believed again: lower, so that trust does not flicker."""
SLACK_TOKENS: Final = 64.0
"""Less than this is no lack: engines cache whole blocks, and sizes are estimates."""
FADE_S: Final = 60.0
_NEWEST: Final = 0.05
_SETTLED: Final = 20
"""Of so many samples on, the newest has this weight in a mean; before, it is a plain mean."""
LEAST_TRUST: Final = 0.05
"""Of two pods that are always wrong, the one that is believed to hold more is tried."""


class PodErrors:
    """One pod's predictions against what was found."""

    __slots__ = (
        "believed_tokens",
        "bias_s",
        "cache_error",
        "cache_samples",
        "error_s",
        "evidence_s",
        "lack_samples",
        "lacking_tokens",
        "trust",
        "ttft_samples",
    )  # fmt: skip

    def __init__(self) -> None:
        self.trust = 1.0
        """By which its matched depths count."""
        self.cache_samples = 0
        """Answers that told their cached tokens."""
        self.cache_error = 0.0
        """Mean of |believed - found| cached tokens, as a share of the prompt."""
        self.lack_samples = 0
        """Of these answers, those of which something was believed cached. Over them, with
        forgetting:"""
        self.believed_tokens = 0.0
        """Tokens believed cached, and"""
        self.lacking_tokens = 0.0
        """those of them that were not."""
        self.evidence_s = 0.0
        """When the last of them came, or doubt last faded."""
        self.ttft_samples = 0
        """First tokens that were seen."""
        self.error_s = 0.0
        """Mean of |predicted - found| seconds to the first token."""
        self.bias_s = 0.0
        """Mean of predicted - found: above 0, it is quicker than predicted."""

    @property
    def lack(self) -> float:
        """Share of the tokens believed cached that were not, 0 where nothing was believed."""
        return self.lacking_tokens / self.believed_tokens if self.believed_tokens > 0.0 else 0.0


class Calibration:
    """The errors by slot, and whom to doubt."""

    __slots__ = ("_pods", "acts", "doubted")

    def __init__(self, slots: int, acts: bool = True):
        """`acts` False: errors are told, but nobody is doubted."""
        self._pods = [PodErrors() for _ in range(slots)]
        self.acts = acts
        self.doubted: HostBitmap = 0
        """Whose trust is below 1."""

    def of(self, slot: int) -> PodErrors:
        """What is known of the pod in this slot."""
        return self._pods[slot]

    def trust(self, slot: int) -> float:
        """The factor for what the pod is believed to hold."""
        return self._pods[slot].trust

    def trusts(self, slots: Slots) -> Values:
        """The factors of these slots."""
        return array("d", [self._pods[slot].trust for slot in slots])

    def forget(self, slot: int) -> None:
        """Another engine process: nothing is known against it."""
        self._pods[slot] = PodErrors()
        self.doubted &= ~(1 << slot)

    def cache_seen(
        self, slot: int, believed: float, found: int, prompt_tokens: int, now: float
    ) -> None:
        """An answer told its cached tokens; `believed` were expected before any trust."""
        pod = self._pods[slot]
        if prompt_tokens <= 0:
            return
        missing = believed - found
        error = (missing if missing > 0.0 else -missing) / prompt_tokens
        count = pod.cache_samples + 1
        pod.cache_samples = count
        pod.cache_error += (error - pod.cache_error) * (
            1.0 / count if count < _SETTLED else _NEWEST
        )
        if believed <= 0.0:
            return
        pod.lack_samples += 1
        pod.believed_tokens = KEEP * pod.believed_tokens + believed
        pod.lacking_tokens *= KEEP
        if missing > SLACK_TOKENS:
            pod.lacking_tokens += missing - SLACK_TOKENS
        pod.evidence_s = now
        if self.doubted or pod.lacking_tokens > DOUBT * pod.believed_tokens:
            self._judge(slot, pod)

    def first_token_seen(self, slot: int, predicted_s: float, found_s: float) -> None:
        """A first token came `found_s` after its request was routed."""
        pod = self._pods[slot]
        error = predicted_s - found_s
        count = pod.ttft_samples + 1
        pod.ttft_samples = count
        weight = 1.0 / count if count < _SETTLED else _NEWEST
        pod.bias_s += (error - pod.bias_s) * weight
        pod.error_s += ((error if error > 0.0 else -error) - pod.error_s) * weight

    def fade(self, now: float) -> None:
        """Halves the doubts that no evidence has come for. To be called from time to time."""
        doubted = self.doubted
        while doubted:
            slot = (doubted & -doubted).bit_length() - 1
            doubted &= doubted - 1
            pod = self._pods[slot]
            if now - pod.evidence_s >= FADE_S:
                pod.evidence_s = now
                pod.lacking_tokens *= 0.5
                self._judge(slot, pod)

    def _judge(self, slot: int, pod: PodErrors) -> None:
        if pod.lack_samples < LEAST_SAMPLES or not self.acts:
            return
        lack = pod.lacking_tokens / pod.believed_tokens
        bit = 1 << slot
        if lack > DOUBT or (self.doubted & bit and lack >= BELIEVE):
            trust = 1.0 - lack
            pod.trust = trust if trust > LEAST_TRUST else LEAST_TRUST  # noqa: FURB136
            self.doubted |= bit
        elif self.doubted & bit:
            pod.trust = 1.0
            self.doubted &= ~bit
