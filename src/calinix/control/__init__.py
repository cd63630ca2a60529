"""The controller: estimates, a queue model and weights. Pure mathematics, usable alone."""

from calinix.control.controller import ControllerReport, PoolController, Steering
from calinix.control.estimators import ArrivalRate, BusyRate, ServiceRate, TpotModel
from calinix.control.model import MpcSettings, MpcSolution, MpcState, Status, equal_delay_target
from calinix.control.mpc import QueueMPC
from calinix.control.shares import closed_form

__all__ = [
    "ArrivalRate",
    "BusyRate",
    "ControllerReport",
    "MpcSettings",
    "MpcSolution",
    "MpcState",
    "PoolController",
    "QueueMPC",
    "ServiceRate",
    "Status",
    "Steering",
    "TpotModel",
    "closed_form",
    "equal_delay_target",
]
