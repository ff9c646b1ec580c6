"""Two trainings in threads of one process."""

import contextlib
import threading

import torch

from rl_modules import PPO
from tests.training import fit, rollouts


class Slow(PPO):
    """Draws its weights while the other thread does."""

    meets: threading.Barrier

    def build_network(self) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            self.meets.wait(0.2)  # with one generator at a time, the other does not come
        super().build_network()


def weights(seed: int, found: dict[int, torch.Tensor]) -> None:
    model = Slow(net_arch=[8])
    fit(model, rollouts("CartPole-v1", n_envs=1, n_steps=4, total_timesteps=4, seed=seed))
    found[seed] = torch.cat([p.detach().flatten() for p in model.parameters()])


def test_weights_drawn_in_two_threads_are_those_of_their_seeds() -> None:
    together: dict[int, torch.Tensor] = {}
    alone: dict[int, torch.Tensor] = {}
    state = torch.get_rng_state()
    Slow.meets = threading.Barrier(2)
    threads = [threading.Thread(target=weights, args=(seed, together)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    Slow.meets = threading.Barrier(1)
    for seed in (1, 2):
        weights(seed, alone)
        assert torch.equal(together[seed], alone[seed])
    assert torch.equal(torch.get_rng_state(), state)
