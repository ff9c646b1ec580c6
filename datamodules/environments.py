"""The environments of a run: an example that gives the spaces, and those of training and evaluation."""

from typing import Any

import gymnasium as gym
from gymnasium.vector import VectorEnv, VectorWrapper
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from datamodules.envs.failures import close, closed_on_error
from datamodules.envs.imported import EnvId, environment_name
from datamodules.envs.masks import IGNORED, VectorWithoutMasks, has_mask, with_source
from datamodules.envs.model import transition_model
from datamodules.envs.tensors import AsArrays, returns_tensors
from datamodules.envs.vector import as_vector, make_env, make_vector_env, mask_source
from rl_modules.checkpoints import space_brief
from rl_modules.common.errors import UsageError
from rl_modules.common.masks import split_space
from rl_modules.common.modules import tree_leaves
from rl_modules.common.spaces import SPACES, example_arrays, space_to_dict

Wrappers = list[str | dict[str, Any]]
#: Gymnasium's wrappers with running statistics, and the argument of the datamodule that does the same.
OWN_STATISTICS = {"NormalizeObservation": "norm_obs", "NormalizeReward": "norm_reward"}


class Environments:
    """Makes the environments of a run from the arguments of :class:`~datamodules.base.ControlDataModule`."""

    def __init__(
        self,
        env_id: EnvId,
        env_kwargs: dict[str, Any] | None,
        wrappers: Wrappers | None,
        eval_env_kwargs: dict[str, Any] | None,
        eval_wrappers: Wrappers | None,
        vectorization_mode: str,
        autoreset_mode: str,
        action_masks: bool,
        seed: int,
    ) -> None:
        self.env_id = as_vector(env_id)
        #: The environment's name in checkpoints and logs.
        self.name = environment_name(self.env_id)
        # Environments in torch step together in training, and are Gymnasium's in evaluation.
        is_torch = isinstance(env_id, str) and env_id.startswith("torch/")
        self.vectorization_mode = "vector_entry_point" if is_torch else vectorization_mode
        #: Whether an engine steps in training, and environments of Gymnasium in evaluation.
        self.has_engine = self.vectorization_mode in ("vector_entry_point", "envpool")
        self.autoreset_mode = autoreset_mode
        self.action_masks = action_masks
        self.seed = seed
        self.env_kwargs, self.wrappers = env_kwargs or {}, wrappers or []
        #: Settings of evaluation: arguments go over those of training, or replace an engine's.
        inherited = {} if self.has_engine and eval_env_kwargs is not None else self.env_kwargs
        self.eval_env_kwargs = {**inherited, **(eval_env_kwargs or {})}
        self.eval_wrappers = self.wrappers if eval_wrappers is None else eval_wrappers
        #: Whether the environments of evaluation are made differently from those of training.
        self.evaluates_elsewhere = bool(eval_env_kwargs) or eval_wrappers is not None
        # Those of evaluation by their number.
        self._kept: dict[int, VectorEnv] = {}
        self._example: Any = None
        # The same, with masks as the environment gives them.
        self._made: Any = None
        self._mask_source: str | None = None

    # ---------------------------------------------------------------- one to look at

    @property
    def is_open(self) -> bool:
        """Whether there is an environment to look at."""
        return self._example is not None

    @property
    def is_one_vector(self) -> bool:
        """Whether the user gave a vector itself, which can't be made again for evaluation."""
        return isinstance(self.env_id, VectorEnv)

    @property
    def may_be_vector(self) -> bool:
        """Whether a callable was given that may make a vector with a number of its own; known after :meth:`open`."""
        is_callable = not isinstance(self.env_id, str | VectorEnv) or ":" in str(self.env_id)
        return is_callable and not self.is_open

    @property
    def example(self) -> Any:
        """One environment, or the vector; available between :meth:`open` and :meth:`close`."""
        if self._example is None:
            raise RuntimeError(
                "the environment is there from setup to teardown; after a fit ask the module for its "
                "spaces, before it call setup"
            )
        return self._example

    @property
    def observation_space(self) -> gym.Space:
        """The space of one observation."""
        return self.example.single_observation_space if self.makes_vector else self.example.observation_space

    @property
    def action_space(self) -> gym.Space:
        """The space of one action."""
        return self.example.single_action_space if self.makes_vector else self.example.action_space

    @property
    def makes_vector(self) -> bool:
        """Whether ``env_id`` is a vector, or a callable that makes one."""
        return isinstance(self.example, VectorEnv)

    def open(self) -> None:
        """Makes the environment to look at."""
        settings = (self.env_kwargs, self.wrappers)
        # An engine preprocesses its environments itself, so those of evaluation show the policy's observations.
        settings = (self.eval_env_kwargs, self.eval_wrappers) if self.has_engine else settings
        self._example = make_env(self.env_id, *settings)
        for name in ("observation_space", "action_space"):
            if not isinstance(getattr(self, name, None), gym.Space):
                raise UsageError(f"the environment {self.name} has no {name}; set it to a space of gymnasium.spaces")
        self._made = self._example
        self._mask_source = self.mask_source_of(self._made)
        if self._mask_source is not None:
            vector = self.makes_vector
            self._example = VectorWithoutMasks(self._made) if vector else with_source(self._made, self._mask_source)
        warn_of_own_statistics(self._made)
        require_entries(self.name, self.observation_space, self.action_space)
        if self.evaluates_elsewhere and not self.makes_vector:
            self.make_for_evaluation(1).close()  # a mistake is reported before training

    def mask_source_of(self, env: Any) -> str | None:
        """Returns where an environment gives its masks; those of a user's vector are in its observations already."""
        if not self.action_masks:
            # A single environment may have masks in the infos of steps alone, which no one has seen yet.
            return IGNORED if has_mask(env) or not isinstance(env, VectorEnv) else None
        return None if isinstance(env, VectorEnv) else mask_source(env)

    def close(self) -> None:
        """Closes the environments that were made here; a vector that the user gave stays open."""
        if self._example is not None:
            if self._made is not self.env_id:
                close(self._example, self.name)
            self._example = self._made = None
        for envs in self._kept.values():
            close(envs, self.name)
        self._kept.clear()

    def transition_model(self) -> Any:
        """Returns the environment's transition table as tensors; None if the environment has none."""
        if self.makes_vector:
            return None
        return transition_model(self._made)

    # ---------------------------------------------------------------- vectors

    def for_training(self, n_envs: int) -> VectorEnv:
        """Returns the vector in which training steps: ``n_envs`` environments, or the user's vector."""
        if self.makes_vector:
            return self.example
        envs = make_vector_env(
            self.env_id,
            n_envs,
            self.vectorization_mode,
            self.autoreset_mode,
            self.env_kwargs,
            self.wrappers,
            self._mask_source,
        )
        with closed_on_error(envs):
            if self.has_engine:
                self._require_same_spaces(envs, evaluates=False)
            return envs

    def for_evaluation(self, n_envs: int) -> VectorEnv:
        """Returns the vector of an evaluation; reused until :meth:`close`."""
        if n_envs not in self._kept or getattr(self._kept[n_envs], "closed", False):
            self._kept[n_envs] = self.make_for_evaluation(n_envs)
        return self._kept[n_envs]

    def make_for_evaluation(self, n_envs: int) -> VectorEnv:
        """Makes the vector of an evaluation; refuses one with other spaces than that of training."""
        if self.makes_vector:
            made = make_env(self.env_id, self.eval_env_kwargs)
            if made is self._made:
                raise UsageError(
                    f"{self.name} was given as one vector, in which training steps: it can't be evaluated "
                    "meanwhile; give a callable that makes it, or eval_freq=0"
                )
            made = made if self._mask_source is None else VectorWithoutMasks(made)
            return AsArrays(made) if returns_tensors(made, self.seed) else made
        envs = make_vector_env(
            self.env_id, n_envs, "sync", "same_step", self.eval_env_kwargs, self.eval_wrappers, self._mask_source
        )
        with closed_on_error(envs):
            if self.evaluates_elsewhere:
                self._require_same_spaces(envs, evaluates=True)
            return envs

    def _require_same_spaces(self, envs: VectorEnv, evaluates: bool) -> None:
        """Refuses a vector of evaluation, or an engine of training, with other spaces than the other, bounds aside."""
        for name in SPACES:
            pair = space_brief(getattr(self, name)), space_brief(getattr(envs, f"single_{name}"))
            trained, evaluated = pair if evaluates else reversed(pair)
            if trained != evaluated:
                raise UsageError(
                    f"eval_env_kwargs and eval_wrappers make environments with the {name} {evaluated}, in "
                    f"training it is {trained}; the policy needs the same"
                )


def require_entries(name: str, observation_space: gym.Space, action_space: gym.Space) -> None:
    """Refuses spaces that no policy can read or act in: of a kind that can't be stored, or without entries."""
    space_to_dict(observation_space)
    observed, is_masked = split_space(observation_space, action_space)
    if not sum(leaf.size for leaf in tree_leaves(example_arrays(observed))):
        raise UsageError(
            f"the environment {name} has the observation_space {observation_space}, which has no entries"
            f"{' beside its action_mask' if is_masked else ''}; "
            "give one that holds at least a constant, such as Box(0, 1, (1,)) with zeros"
        )
    if action_space.shape is not None and 0 in action_space.shape:
        raise UsageError(
            f"the environment {name} has the action_space {action_space}, which has no entries; give one "
            "with at least one action"
        )


def warn_of_own_statistics(env: Any) -> None:
    """Warns of wrappers with running statistics, which evaluations and checkpoints lack; names the replacement."""
    while isinstance(env, gym.Wrapper | VectorWrapper):
        name = type(env).__name__
        if name in OWN_STATISTICS and type(env).__module__.startswith("gymnasium."):
            rank_zero_warn(
                f"the wrapper {name} keeps running statistics of its own: evaluations begin with others, "
                f"and resumed runs with none; leave it out and set {OWN_STATISTICS[name]}=True"
            )
        env = env.env
