"""The closed form: the best weights that stay the same over the whole horizon.

With one share p_i per pod, w_i = n p_i and c = dt a the objective is a parabola in each weight,
and all are joined by sum w = n alone. Its minimum is w_i = clip(b_i - nu, least, most), where b_i
is the vertex of pod i's parabola and the multiplier nu makes the sum come out.
"""

from __future__ import annotations

import numpy as np

from calinix.control.model import Floats, MpcSettings, MpcState, usable


def bounded_weights(wanted: Floats, least: float, most: float) -> Floats:
    """The weights nearest to the wanted ones with mean 1 and within [least, most].

    Shape [n], n >= 1, finite, least <= 1 <= most. sum clip(wanted - nu) falls in straight pieces
    as nu grows; it bends where a pod leaves its upper bound or reaches its lower one. Sorting
    these places and adding up the pieces finds nu without iterating.
    """
    pods = wanted.size
    most = min(most, float(pods))
    wanted = wanted - wanted.max()
    bends = np.concatenate((wanted - most, wanted - least))
    order = bends.argsort()
    bends = bends[order]
    falling = np.where(order < pods, 1.0, -1.0).cumsum()
    """Pods between their bounds, from each bend on."""
    sums = pods * most - np.concatenate(((0.0,), (falling[:-1] * np.diff(bends)).cumsum()))
    # The last bend at which the sum is still n or more; the solution lies on the piece after it.
    place = max(int((-sums).searchsorted(-float(pods), "right")) - 1, 0)
    excess = float(sums[place]) - pods
    slope = float(falling[place])
    nu = float(bends[place]) + (excess / slope if slope > 0.0 else 0.0)
    weights = np.minimum(np.maximum(wanted - nu, least), most)
    return _exact(weights, least, most)


def _exact(weights: Floats, least: float, most: float) -> Floats:
    """The weights with what rounding left of the sum spread over the room they have.

    Where wanted weights are many digits apart, rounding is not small.
    """
    missing = weights.size - float(weights.sum())
    room = (most if missing > 0.0 else least) - weights
    total = float(room.sum())
    if total != 0.0:
        weights = weights + room * min(missing / total, 1.0)
    return np.minimum(np.maximum(weights, least), most)


def blocked_weights(state: MpcState, settings: MpcSettings) -> Floats:
    """Weights of a usable state with something arriving; shape [n], mean 1."""
    pods, steps = state.pods, settings.horizon
    per_weight = settings.dt_s * state.arrival_rate / pods
    """What a weight of 1 adds to a queue in a step."""
    ones = steps * (steps + 1) / 2.0
    squares = ones * (2 * steps + 1) / 3.0
    target = settings.target_queue if state.target is None else state.target
    pull = ones * (state.queue - target) - (squares * settings.dt_s) * state.service_rate
    centre = settings.regularisation * steps
    wanted = (centre - per_weight * pull) / (per_weight * per_weight * squares + centre)
    return bounded_weights(wanted, settings.weight_min, settings.weight_max)


def closed_form(state: MpcState, settings: MpcSettings) -> Floats:
    """Shares p of shape [n] with sum 1, kept over the horizon; masked pods get 0.

    Every alive pod's share is within [weight_min / n, weight_max / n], n being how many are alive.
    Equal shares where nothing arrives, and all zeros where nobody is alive.
    """
    alive = np.ones(state.pods, bool) if state.alive is None else state.alive
    shares = np.zeros(state.pods)
    known = usable(state)
    if known.pods == 0:
        return shares
    weights = np.ones(known.pods)
    if known.pods > 1 and known.arrival_rate > 0.0:
        weights = blocked_weights(known, settings)
    shares[alive] = weights / known.pods
    return shares
