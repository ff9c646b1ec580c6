"""Models chose the same actions after `rl import-sb3` as in Stable-Baselines3, and after `rl export-sb3` as here."""

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import rl_modules
from datamodules import ReplayDataModule, RolloutDataModule
from recipes.cli import main
from recipes.cli.information import general_help
from rl_modules.common.errors import UsageError
from tests.training import fit

stable_baselines3 = pytest.importorskip("stable_baselines3", reason="needs the test extra")
sb3_contrib = pytest.importorskip("sb3_contrib", reason="needs the test extra")
vec_env = pytest.importorskip("stable_baselines3.common.vec_env", reason="needs the test extra")

pytestmark = [pytest.mark.bench, pytest.mark.long]

N = 1000
VECTOR = spaces.Box(-10, 10, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (3, 36, 36), np.uint8)
IMAGE_LAST = spaces.Box(0, 255, (36, 36, 3), np.uint8)
OBSERVED = {
    "Mlp": VECTOR,
    "Cnn": IMAGE,
    "MultiInput": spaces.Dict({"image": IMAGE, "vector": VECTOR, "choice": spaces.Discrete(3)}),
}
CHOICE, TORQUE = spaces.Discrete(4), spaces.Box(np.array([-2.0, 0.1]), np.array([2.0, 0.7]), dtype=np.float32)
ACTIONS = {"PPO": CHOICE, "A2C": TORQUE, "TRPO": TORQUE, "RecurrentPPO": TORQUE, "DQN": CHOICE, "QRDQN": CHOICE}
CASES = [(name, policy) for name in (*ACTIONS, "SAC", "TD3", "TQC") for policy in OBSERVED]


class Random(gym.Env):
    """Random observations, which do not depend on the actions."""

    def __init__(self, observed: spaces.Space, acted: spaces.Space) -> None:
        self.observation_space, self.action_space = observed, acted

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        return self.observation_space.sample(), 0.0, False, False, {}


def torque() -> gym.Env:
    """For `--env`."""
    return Random(VECTOR, TORQUE)


def saved(folder: Path, name: str, policy: str = "Mlp", **arguments: Any) -> Any:
    """A model of SB3 whose weights are far from their small initial ones, saved to ``model.zip``."""
    cls = getattr(stable_baselines3, name, None) or getattr(sb3_contrib, name)
    if name in ("DQN", "QRDQN", "SAC", "TD3", "TQC"):
        arguments["buffer_size"] = 10
    env = Random(OBSERVED[policy], ACTIONS.get(name, TORQUE))
    kind = f"{policy}{'Lstm' if name == 'RecurrentPPO' else ''}Policy"
    model = cls(kind, env, seed=1, device="cpu", **arguments)
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    model.save(folder / "model.zip")
    return model


def imported(folder: Path, name: str, *words: str) -> Any:
    """The module that the command writes."""
    output = str(folder / "model.ckpt")
    main(["import-sb3", str(folder / "model.zip"), *words, "-o", output])
    return getattr(rl_modules, name).load_from_checkpoint(output)


def exported(checkpoint: Path, cls: Any) -> Any:
    """The model of SB3 that the command writes."""
    archive = checkpoint.with_name("again.zip")
    main(["export-sb3", str(checkpoint), "-o", str(archive)])
    return cls.load(archive, device="cpu")


def observations(space: spaces.Space, n: int = N) -> Any:
    """A batch of them."""
    space.seed(5)
    drawn = [space.sample() for _ in range(n)]
    if isinstance(space, spaces.Dict):
        return {name: np.stack([x[name] for x in drawn]) for name in space}
    return np.stack(drawn)


def same(ours: Any, theirs: Any) -> bool:
    """Whether actions agree: choices in all but ties of float32, numbers to 1e-5."""
    if theirs.dtype.kind in "iu":
        return bool((ours == theirs).mean() > 0.998)
    return bool(np.allclose(ours, theirs, atol=1e-5))


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_the_same_actions(name: str, policy: str, tmp_path: Path) -> None:
    theirs = saved(tmp_path, name, policy)
    batch = observations(OBSERVED[policy])
    ours = imported(tmp_path, name)
    expected = theirs.predict(batch, deterministic=True)[0]
    assert same(ours.predict(batch, deterministic=True)[0], expected)
    assert len(np.unique(expected, axis=0)) > 1
    assert ours.hparams["gamma"] == theirs.gamma
    again = exported(tmp_path / "model.ckpt", type(theirs))
    assert same(again.predict(batch, deterministic=True)[0], expected)


def test_values_and_memory_are_the_same(tmp_path: Path) -> None:
    theirs, batch = saved(tmp_path, "RecurrentPPO"), observations(VECTOR, 8)
    ours, state, its = imported(tmp_path, "RecurrentPPO"), None, None
    for _ in range(5):
        (mine, state), (action, its) = (
            model.predict(batch, memory, deterministic=True) for model, memory in ((ours, state), (theirs, its))
        )
        assert same(mine, action)
    theirs = saved(
        tmp_path, "PPO", policy_kwargs={"net_arch": {"pi": [8], "vf": [16, 8]}, "activation_fn": torch.nn.ELU}
    )
    x = torch.as_tensor(batch)
    ours = imported(tmp_path, "PPO")
    torch.testing.assert_close(ours.network(x)[1], theirs.policy.predict_values(x).squeeze(1))
    theirs = saved(tmp_path, "SAC", policy_kwargs={"net_arch": {"pi": [8], "qf": [16, 8]}, "n_critics": 3})
    ours, acts = imported(tmp_path, "SAC"), torch.rand(8, 2)
    for mine, its in ((ours.network.critics, theirs.critic), (ours.target_network, theirs.critic_target)):
        torch.testing.assert_close(torch.stack([q.reshape(-1) for q in mine(x, acts)]), torch.cat(its(x, acts), 1).T)


def test_statistics_of_vecnormalize(tmp_path: Path) -> None:
    for policy, keys in (("Mlp", None), ("MultiInput", ["vector"])):
        theirs = saved(tmp_path, "PPO", policy)
        space = OBSERVED[policy]
        env = vec_env.VecNormalize(
            vec_env.DummyVecEnv([partial(Random, space, CHOICE)]), clip_obs=0.9, norm_obs_keys=keys
        )
        its = env.obs_rms["vector"] if keys else env.obs_rms
        its.update(3 + 2 * np.random.default_rng(0).normal(size=(50, 3)))
        env.save(str(tmp_path / "vecnormalize.pkl"))
        ours, batch = imported(tmp_path, "PPO", str(tmp_path / "vecnormalize.pkl")), observations(space)
        expected = theirs.predict(env.normalize_obs(batch), deterministic=True)[0]
        assert same(ours.predict(batch, deterministic=True)[0], expected)
        found = ours.observation_statistics["vector"] if keys else ours.observation_statistics
        np.testing.assert_allclose(found[0], its.mean)


def test_the_environment_gives_the_spaces(tmp_path: Path) -> None:
    saved(tmp_path, "SAC")
    ours = imported(tmp_path, "SAC", "--env", "tests.peers.test_sb3_import:torque")
    assert ours.hparams["action_space"]["low"] == [-2.0, pytest.approx(0.1)]


def refused(folder: Path, words: list[str], capsys: pytest.CaptureFixture) -> str:
    """What the command prints as it ends with an error."""
    with pytest.raises(SystemExit):
        main(["import-sb3", *words, "-o", str(folder / "model.ckpt")])
    assert not (folder / "model.ckpt").exists()
    return capsys.readouterr().err


def test_what_has_no_counterpart_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = str(tmp_path / "model.zip")
    saved(tmp_path, "A2C", use_sde=True)
    assert "use_sde is not supported" in refused(tmp_path, [model], capsys)
    saved(tmp_path, "PPO", "Cnn", policy_kwargs={"features_extractor_kwargs": {"features_dim": 64}})
    assert "policy_kwargs or use_sde is not supported: features_extractor_kwargs" in refused(tmp_path, [model], capsys)
    saved(tmp_path, "PPO", "Cnn", policy_kwargs={"share_features_extractor": False})
    assert "vf_features_extractor.cnn.0.weight there has no counterpart" in refused(tmp_path, [model], capsys)
    (tmp_path / "text.zip").write_text("no archive")
    assert "no file that Stable-Baselines3's model.save wrote" in refused(
        tmp_path, [str(tmp_path / "text.zip")], capsys
    )
    saved(tmp_path, "PPO")
    assert "no statistics of VecNormalize" in refused(tmp_path, [model, model], capsys)


def test_no_code_of_a_pickle_runs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    saved(tmp_path, "PPO")
    made = tmp_path / "made"
    (tmp_path / "evil.pkl").write_bytes(f"cos\nsystem\n(S'touch {made}'\ntR.".encode())
    assert "no statistics" in refused(tmp_path, [str(tmp_path / "model.zip"), str(tmp_path / "evil.pkl")], capsys)
    assert not made.exists()


class Masked(Random):
    """Two of four actions are allowed."""

    def action_masks(self) -> np.ndarray:
        return np.array([True, False, True, False])


def test_masks(tmp_path: Path) -> None:
    env = Masked(VECTOR, CHOICE)
    theirs, batch = sb3_contrib.MaskablePPO("MlpPolicy", env, seed=1, device="cpu"), observations(VECTOR)
    theirs.save(tmp_path / "model.zip")
    masks = np.random.default_rng(0).random((N, 4)) < 0.5
    masks[:, 1] = True
    expected = theirs.predict(batch, action_masks=masks, deterministic=True)[0]
    ours = imported(tmp_path, "PPO")
    assert same(ours.predict(batch, action_masks=masks, deterministic=True)[0], expected)
    model = trained(tmp_path, rl_modules.PPO(), RolloutDataModule(lambda: Masked(VECTOR, CHOICE), **SHORT))
    again = exported(tmp_path / "own.ckpt", sb3_contrib.MaskablePPO)
    own = model.predict(batch, action_masks=masks, deterministic=True)[0]
    assert same(own, again.predict(batch, action_masks=masks, deterministic=True)[0])


SHORT: dict[str, Any] = {"n_envs": 2, "total_timesteps": 64, "eval_freq": 0}


def trained(folder: Path, model: Any, data: Any) -> Any:
    """A module after a few updates, with its checkpoint."""
    trainer = fit(model, data)
    trainer.save_checkpoint(folder / "own.ckpt")
    return model


@pytest.mark.parametrize(("name", "space"), [("PPO", IMAGE_LAST), ("A2C", VECTOR), ("SAC", VECTOR), ("DDPG", VECTOR)])
def test_training_goes_on_with_the_same_optimizer(name: str, space: spaces.Space, tmp_path: Path) -> None:
    """Both libraries' next step, from the same gradients, gives the same actions."""
    env, batch = (lambda: Random(space, TORQUE)), observations(space, 16)
    replays = name in ("SAC", "DDPG")
    data: Any = (
        ReplayDataModule(env, learning_starts=8, batch_size=4, buffer_size=100, **SHORT)
        if replays
        else RolloutDataModule(env, n_steps=8, **SHORT)
    )
    ours = trained(tmp_path, getattr(rl_modules, name)(learning_rate="lin_0.001"), data)
    theirs = exported(tmp_path / "own.ckpt", getattr(stable_baselines3, name))
    assert theirs.num_timesteps == data.num_timesteps and theirs.lr_schedule(0.5) == pytest.approx(0.0005)
    optimizers = [ours.trainer.optimizers[0]]
    optimizers += [theirs.actor.optimizer, theirs.critic.optimizer] if replays else [theirs.policy.optimizer]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 0.01
            for parameter in group["params"]:
                parameter.grad = 3 * parameter.detach()
        optimizer.step()
    action = theirs.predict(batch, deterministic=True)[0]
    assert same(ours.predict(batch, deterministic=True)[0], action)
    assert not same(trained_before(tmp_path, name).predict(batch, deterministic=True)[0], action)


def trained_before(folder: Path, name: str) -> Any:
    return getattr(rl_modules, name).load_from_checkpoint(folder / "own.ckpt")


@pytest.mark.parametrize(("policy", "keys"), [("Mlp", None), ("MultiInput", ["vector"])])
def test_statistics_become_those_of_vecnormalize(policy: str, keys: list[str] | None, tmp_path: Path) -> None:
    space = OBSERVED[policy]
    data = RolloutDataModule(lambda: Random(space, CHOICE), norm_obs=True, norm_reward=True, n_steps=8, **SHORT)
    ours = trained(tmp_path, rl_modules.PPO(), data)
    theirs = exported(tmp_path / "own.ckpt", stable_baselines3.PPO)
    env = vec_env.VecNormalize.load(
        str(tmp_path / "again.vecnormalize.pkl"), vec_env.DummyVecEnv([partial(Random, space, CHOICE)])
    )
    assert env.norm_obs_keys == keys
    assert env.ret_rms.count == pytest.approx(data.collector.normalizers.of_rewards.running.count)
    batch = observations(space)
    expected = theirs.predict(env.normalize_obs(batch), deterministic=True)[0]
    assert same(ours.predict(batch, deterministic=True)[0], expected)


def test_what_stable_baselines_lacks_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    data = ReplayDataModule(lambda: Random(VECTOR, CHOICE), learning_starts=8, batch_size=4, **SHORT)
    trained(tmp_path, rl_modules.DQN(dueling=True), data)
    with pytest.raises(SystemExit):
        main(["export-sb3", str(tmp_path / "own.ckpt"), "-o", str(tmp_path / "again.zip")])
    assert "DQN of SB3 has no network like it" in capsys.readouterr().err


def test_loading_the_archive_names_the_command(tmp_path: Path) -> None:
    saved(tmp_path, "PPO")
    with pytest.raises(UsageError, match=r"a model of Stable-Baselines3; `rl import-sb3 .*model.zip -o .*model.ckpt`"):
        rl_modules.PPO.load_from_checkpoint(tmp_path / "model.zip")
    assert "import-sb3" in general_help()
