"""The full horizon: weights of their own for every step, by OSQP (install `calinix[mpc]`).

In v = w - 1 the problem is a strictly convex quadratic programme: pod i's queue after step k is
e_i + sum over j <= k of (c/n (1 + v_ij) - dt mu_i), the sum over pods of v is 0 in every step, and
each v is within the weights' bounds. Only the pods' sums join the pods, so that the matrix is n
equal blocks of H x H. Adding the same to all queues changes the objective by a constant: means are
taken out first, which keeps the numbers small.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from calinix.control.model import Floats, MpcSettings, MpcState, Status, objective
from calinix.control.shares import blocked_weights, bounded_weights
from calinix.errors import CalinixError

TOLERANCE = 1e-6
"""Absolute and relative, of weights."""
MAX_ITERATIONS = 4000
"""Some 25 are usual; queues of very different sizes need hundreds."""


class SolverMissing(CalinixError):
    """OSQP is not installed."""


class FullHorizon:
    """A solver that is set up once for each number of pods and starts from its last solution."""

    def __init__(self, settings: MpcSettings):
        try:
            import osqp  # noqa: PLC0415
            from scipy import sparse  # noqa: PLC0415
        except ImportError as error:
            raise SolverMissing("the full horizon needs OSQP: install calinix[mpc]") from error
        self._osqp, self._sparse = osqp, sparse
        self.settings = settings
        steps = settings.horizon
        self._adds = np.tril(np.ones((steps, steps)))
        """Row k sums what came in the steps up to k."""
        self._by_column = np.tril_indices(steps)
        """Of a symmetric block: its upper triangle, column after column."""
        self._pods = 0
        self._problem: Any = None

    def decide(self, known: MpcState) -> tuple[Floats, Status]:
        """Weights of shape [H, n] of a usable state with 2 pods or more and something arriving.

        Each step's are projected to their bounds and to mean 1; they are never worse than the
        closed form, which is taken where it is better.
        """
        settings = self.settings
        blocked = np.tile(blocked_weights(known, settings), (settings.horizon, 1))
        found = self._solve(known)
        if found is None:
            return blocked, Status.CLOSED_FORM
        weights = np.array(
            [bounded_weights(one, settings.weight_min, settings.weight_max) for one in found]
        )
        if objective(known, weights, settings) > objective(known, blocked, settings):
            weights = blocked
        return weights, Status.SOLVED

    def _solve(self, known: MpcState) -> Floats | None:
        """What OSQP says, shape [H, n]; None where it did not arrive at a solution."""
        hessian, linear = self._terms(known)
        values = np.tile(hessian[self._by_column], known.pods)
        if known.pods == self._pods:
            self._problem.update(q=linear, Px=values)
        else:
            self._set_up(known.pods, values, linear)
        answer = self._problem.solve(raise_error=False)
        solved = self._osqp.SolverStatus
        if answer.info.status_val not in (solved.OSQP_SOLVED, solved.OSQP_SOLVED_INACCURATE):
            self._pods = 0  # Starts anew rather than from here.
            return None
        found: Floats = 1.0 + answer.x.reshape(known.pods, self.settings.horizon).T
        return found if np.isfinite(found).all() else None

    def _terms(self, known: MpcState) -> tuple[Floats, Floats]:
        """A pod's H x H block and the linear term [n H], both scaled to the size of 1."""
        settings, adds = self.settings, self._adds
        target = settings.target_queue if known.target is None else known.target
        off = known.queue - target
        drain = settings.dt_s * known.service_rate
        off, drain = off - off.mean(), drain - drain.mean()
        per_weight = settings.dt_s * known.arrival_rate / known.pods
        hessian = per_weight**2 * adds.T @ adds + settings.regularisation * np.eye(len(adds))
        after = off[:, None] - drain[:, None] * np.arange(1, len(adds) + 1)
        scale = float(hessian[0, 0])
        return hessian / scale, (per_weight / scale) * (after @ adds).ravel()

    def _set_up(self, pods: int, values: Floats, linear: Floats) -> None:
        settings, sparse = self.settings, self._sparse
        steps = settings.horizon
        block = sparse.csc_matrix(np.triu(np.ones((steps, steps))))
        matrix = sparse.kron(sparse.eye(pods), block, format="csc")
        matrix.data[:] = values
        eye = sparse.eye(pods * steps, format="csc")
        sums = sparse.kron(np.ones((1, pods)), sparse.eye(steps), format="csc")
        most = min(settings.weight_max, float(pods))
        none = np.zeros(steps)
        self._problem = self._osqp.OSQP()
        self._problem.setup(
            matrix,
            linear,
            sparse.vstack([sums, eye], format="csc"),
            np.concatenate((none, np.full(pods * steps, settings.weight_min - 1.0))),
            np.concatenate((none, np.full(pods * steps, most - 1.0))),
            verbose=False,
            eps_abs=TOLERANCE,
            eps_rel=TOLERANCE,
            max_iter=MAX_ITERATIONS,
            polishing=False,
        )
        self._pods = pods
