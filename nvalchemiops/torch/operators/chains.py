"""Nosé-Hoover chains of all systems in one launch: some 150 tiny operations for each half step otherwise.

Derivatives, of every order, are those of the same steps in torch, `chain_steps`.
"""

from typing import Any, NamedTuple

import torch
import warp as wp

from nvalchemiops.kernels.chains import SUZUKI_YOSHIDA, chain_kernel
from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.autograd.declaration import with_fields
from nvalchemiops.torch.launch import launch


class Chains(NamedTuple):
    """The chains of all systems, in float64, and the time for which they move."""

    positions: torch.Tensor  # (n_systems, length), as the velocities
    velocities: torch.Tensor
    # (n_systems,), Σ m v² of what a chain is coupled to, which follows the factor, and its mean: g kT for g degrees of
    # freedom
    energies: torch.Tensor
    targets: torch.Tensor
    temperatures: torch.Tensor  # (n_systems,), kT
    masses: torch.Tensor  # (n_systems, length), Q of the thermostats, energy times time²
    times: torch.Tensor  # (n_systems,)


@with_fields
def chain_steps(chains: Chains, loops: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `move_chains` computes, in operations of torch."""
    positions, velocities, energies, targets, temperatures, masses, times = chains
    u, last, log_scale = list(velocities.unbind(1)), velocities.shape[1] - 1, torch.zeros_like(times)
    # (Q_{k-1} u_{k-1}² - kT) / Q_k, and (Σ m v² - g kT) / Q_1 for the first, with all divisions at the start
    q = masses.unbind(1)
    gains = [1.0 / q[0], *(before / mass for before, mass in zip(q, q[1:]))]
    losses = [targets / q[0], *(temperatures / mass for mass in q[1:])]

    def push(k: int, time: torch.Tensor) -> None:
        """Half a step of the velocity of thermostat k."""
        force = gains[k] * (u[k - 1] * u[k - 1] if k else energies) - losses[k]
        if k == last:
            u[k] = u[k] + 0.5 * time * force
        else:
            damping = torch.exp(-0.25 * time * u[k + 1])
            u[k] = (u[k] * damping + 0.5 * time * force) * damping

    for weight in SUZUKI_YOSHIDA * loops:
        time = times * weight / loops
        for k in range(last, -1, -1):
            push(k, time)
        positions = positions + time.unsqueeze(1) * torch.stack(u, 1)
        log_scale, energies = log_scale - time * u[0], energies * torch.exp(-2.0 * time * u[0])
        for k in range(last + 1):
            push(k, time)
    return positions, torch.stack(u, 1), log_scale


def _pullback(inputs: dict[str, Any], gradients: dict[str, Any]) -> dict[str, torch.Tensor]:
    given = [inputs[name] for name in Chains._fields]
    results, pull, *_ = torch.func.vjp(lambda *chains: chain_steps(*chains, inputs["loops"]), *given)
    names = ("moved", "pushed", "log_scales")
    incoming = tuple(
        torch.zeros_like(result) if gradients[name] is None else gradients[name] for name, result in zip(names, results)
    )
    return dict(zip(Chains._fields, pull(incoming)))


@warp_custom_op(
    "nvalchemiops::move_chains",
    outputs=[
        OutputSpec("moved", wp.float64, lambda positions, *_: tuple(positions.shape)),
        OutputSpec("pushed", wp.float64, lambda positions, *_: tuple(positions.shape)),
        OutputSpec("log_scales", wp.float64, lambda positions, *_: (positions.shape[0],)),
    ],
    grad_arrays=("moved", "pushed", "log_scales", *Chains._fields),
    backward=_pullback,
    trusted=True,
)
@with_fields
def move_chains(chains: Chains, loops: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions and velocities of the chains after some time, and the logarithm of the factor of the velocities.

    Parameters
    ----------
    positions, velocities, energies, targets, temperatures, masses, times
        The fields of `Chains`.
    loops : int
        How often the three steps of `SUZUKI_YOSHIDA` are repeated, each for a part of the time.
    """
    moved, pushed = torch.empty_like(chains.positions), torch.empty_like(chains.positions)
    log_scales = torch.empty_like(chains.times)
    launch(chain_kernel(), chains.times.shape[0], [*chains, loops], [moved, pushed, log_scales])
    return moved, pushed, log_scales
