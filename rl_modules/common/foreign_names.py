"""Options' names in other programs and libraries, and their names here."""

import inspect
from collections.abc import Iterable
from typing import Any, NoReturn

from rl_modules.common.errors import UsageError, did_you_mean

#: Names that are common to many programs.
GENERAL = {
    "lr": "model.learning_rate",
    "env": "data.env_id",
    "env_name": "data.env_id",
    "environment": "data.env_id",
    "timesteps": "data.total_timesteps",
    "steps": "data.total_timesteps",
    "num_envs": "data.n_envs",
    "epochs": "trainer.max_epochs",
    "seed": "seed_everything",
    "device": "trainer.accelerator",
    "gpus": "trainer.devices",
    "gpu": "trainer.devices",
    "ckpt": "ckpt_path",
    "checkpoint_path": "ckpt_path",
    "load": "ckpt_path",
    "algo": "model",
    "algorithm": "model",
    "policy": "model",
    "optimizer": "model.optimizer",
    "hidden_sizes": "model.net_arch",
    "max_grad_norm": "model.max_grad_norm",
    "save_dir": "trainer.default_root_dir",
    "output_dir": "trainer.default_root_dir",
    "logdir": "trainer.default_root_dir",
    "wandb": "trainer.logger",
}
#: Stable-Baselines3 and its zoo.
STABLE_BASELINES3 = {
    "n_timesteps": "data.total_timesteps",
    "policy_kwargs": "model.net_arch",
    "tensorboard_log": "trainer.default_root_dir",
    "frame_stack": "data.wrappers",
    "env_wrapper": "data.wrappers",
    "normalize": "data.norm_obs",
    "normalize_obs": "data.norm_obs",
    "normalize_reward": "data.norm_reward",
    "vf_coeff": "model.vf_coef",
    "eval_episodes": "data.n_eval_episodes",
    "n_eval": "data.n_eval_episodes",
    "eval_steps": "data.eval_freq",
    "log_interval": "model.log_every",
    "save_freq": "checkpoint.interval_s",
    "verbose": "trainer.enable_progress_bar",
}
#: Names of its methods and attributes, and of those of sb3-contrib, with what to use here.
METHODS = {
    "learn": "recipes.Trainer().fit(model, data) trains it for the datamodule's total_timesteps",
    "save": "trainer.save_checkpoint(path) writes a checkpoint, as each run does by itself, and `rl export-sb3` makes "
    "an archive of Stable-Baselines3 of one",
    "load": "load_from_checkpoint(path) loads a checkpoint, and `rl import-sb3 model.zip -o model.ckpt` writes one of "
    "an archive of Stable-Baselines3",
    "get_parameters": "state_dict() returns the weights",
    "set_parameters": "load_state_dict(weights) sets the weights",
    "set_env": "environments belong to a datamodule; Trainer.fit with another datamodule continues from these weights",
    "get_env": "environments belong to the datamodule, which makes them of its env_id",
    "policy": "network is the network; act and predict choose actions",
    "save_replay_buffer": "the buffer is the datamodule's, and a run's checkpoint holds it",
    "load_replay_buffer": "the buffer is the datamodule's, and a run resumes with it",
    "num_timesteps": "transitions are counted by the datamodule, as its num_timesteps",
    "set_logger": "loggers belong to the Trainer",
    "set_random_seed": "the seed is the datamodule's seed",
}
#: Names of its classes and functions, and of those of sb3-contrib, with what to use here.
CLASSES = {
    "MaskablePPO": "PPO reads action masks where the environment gives them, or predict's action_masks",
    "HerReplayBuffer": "ReplayDataModule(…, n_sampled_goal=4, goal_selection_strategy='future') replays in hindsight",
    "NStepReplayBuffer": "ReplayDataModule(…, n_steps=3) replays returns of n steps",
    "ReplayBuffer": "ReplayDataModule(env_id, buffer_size=…) has the buffer",
    "DictReplayBuffer": "ReplayDataModule(env_id, buffer_size=…) has the buffer, for any space",
    "VecNormalize": "the datamodule normalises: norm_obs=True, norm_reward=True",
    "VecFrameStack": "the datamodule's wrappers take Gymnasium's: [{'class_path': "
    "'gymnasium.wrappers.FrameStackObservation', 'init_args': {'stack_size': 4}}]",
    "make_vec_env": "the datamodule makes its n_envs environments",
    "DummyVecEnv": "the datamodule makes its n_envs environments",
    "SubprocVecEnv": "the datamodule makes its n_envs environments, in processes with vectorization_mode='async'",
    "EvalCallback": "the datamodule evaluates: eval_freq, n_eval_episodes",
    "CheckpointCallback": "each run writes checkpoints by itself: recipes.callbacks.Checkpoints(interval_s=60)",
}
#: CleanRL.
CLEANRL = {
    "num_steps": "data.n_steps",
    "update_epochs": "data.n_epochs",
    "num_minibatches": "data.n_minibatches",
    "clip_coef": "model.clip_range",
    "clip_vloss": "model.clip_range_vf",
    "norm_adv": "model.normalize_advantage",
    "anneal_lr": "model.learning_rate",
    "cuda": "trainer.accelerator",
    "no_cuda": "trainer.accelerator",
    "track": "trainer.logger",
    "wandb_project_name": "trainer.logger",
    "capture_video": "record_every",
    "exp_name": "trainer.logger",
    "torch_deterministic": "trainer.deterministic",
    "policy_lr": "model.learning_rate",
    "q_lr": "model.learning_rate",
    "policy_frequency": "model.policy_delay",
    "exploration_noise": "model.action_noise",
    "autotune": "model.ent_coef",
    "target_network_frequency": "model.target_update_interval",
    "start_e": "model.exploration_initial_eps",
    "end_e": "model.exploration_final_eps",
}
#: TRL and transformers.
TRL = {
    "dataset_name": "data.dataset",
    "per_device_train_batch_size": "data.batch_size",
    "per_device_eval_batch_size": "data.eval_batch_size",
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "num_train_epochs": "trainer.max_epochs",
    "use_vllm": "model.sampler",
    "vllm_mode": "model.sampler",
    "use_peft": "model.lora",
    "lora_r": "model.lora",
    "lora_alpha": "model.lora",
    "peft_config": "model.lora",
    "rloo_k": "data.num_generations",
    "num_ppo_epochs": "data.num_iterations",
    "response_length": "model.max_completion_length",
    "max_new_tokens": "model.max_completion_length",
    "kl_coef": "model.beta",
    "init_kl_coef": "model.beta",
    "bf16": "trainer.precision",
    "fp16": "trainer.precision",
    "report_to": "trainer.logger",
    "logging_dir": "trainer.default_root_dir",
    "save_steps": "checkpoint.interval_s",
    "eval_strategy": "data.eval_steps",
    "model": "model.model_name_or_path",
    "processing_class": "model.tokenizer_name_or_path",
    "train_dataset": "data.dataset",
    "eval_dataset": "data.eval_path",
    "ref_model": "model.ref_model_name_or_path",
    "reward_model": "model.reward_model_name_or_path",
    "model_name": "model.model_name_or_path",
    "tokenizer": "model.tokenizer_name_or_path",
    "assistant_only_loss": "data.completion_only_loss",
    "dataset_text_field": "data.columns",
    "tools": "data.environment",
    "environment_factory": "data.environment",
    "rollout_func": "data.environment",
    "max_tool_calling_iterations": "data.max_turns",
}
#: Arguments of the control algorithms, for a language module.
CONTROL = {"init_from": "model.model_name_or_path"}
#: The full name of an option by the name that a person knows.
MEANT = {**GENERAL, **STABLE_BASELINES3, **CLEANRL, **TRL, **CONTROL}
#: What is different about an option that has another name here, by the name that a person knows.
DIFFERENT = {
    "num_train_epochs": "with PromptDataModule an epoch is one generation, and n passes over the prompts are "
    "n*prompts*num_generations/(batch_size*steps_per_generation*ranks) epochs",
    "per_device_train_batch_size": "the rows of an optimizer step and rank, gradient_accumulation_steps times as many",
    "gradient_accumulation_steps": "which divides batch_size into micro-batches",
    "assistant_only_loss": "of a conversation it counts the assistant's turns, by default",
    "dataset_text_field": "{text: the field}",
    "tools": "datamodules.language.tools:ToolEnvironment, with environment_kwargs={tools: […]}",
    "init_from": "a language model starts from the directory that `rl export --ckpt_path PATH --output FOLDER` writes",
}
#: What to use here in place of an option that does not exist.
INSTEAD = {
    "replay_buffer_class": "the buffer is ReplayDataModule's: n_sampled_goal=4 replays in hindsight, n_steps=3 returns "
    "of n steps",
    "replay_buffer_kwargs": "the buffer is ReplayDataModule's, with n_sampled_goal, goal_selection_strategy, n_steps "
    "and buffer_size",
    "generation_kwargs": "what samples differently are arguments of the module: temperature, top_k, top_p, min_p and "
    "repetition_penalty",
    "model_init_kwargs": "fields of the architecture are model_config; torch_dtype, attn_implementation, "
    "gradient_checkpointing and lora are arguments of the module",
    "formatting_func": "columns of the datamodule builds texts from columns, {prompt: '{question}'}; for anything else "
    "map the dataset before",
    "shuffle_dataset": "every pass has an order of its own; streaming=true with streaming_buffer=1 keeps the source's",
    "buffer_device": "minibatches are gathered on the host and sent to the Trainer's device; leave it out",
    "max_prompt_length": "no prompt is truncated here: overlong=drop of the datamodule leaves out records that are "
    "longer than the model's context, or than max_length where the datamodule has one",
    "chat_template_path": "a template is the tokenizer's: put it as chat_template.jinja into the folder that "
    "tokenizer_name_or_path names, or in Python set chat_template of the tokenizer given there",
}
#: Advice for an argument that another object takes, by the base of the class that was given it.
ELSEWHERE = {
    "ControlModule": "environments and their counts belong to the datamodule (RolloutDataModule or ReplayDataModule), "
    "devices and loggers to the Trainer",
    "LanguageModule": "reward functions, prompts, generations, max_length and packing belong to the datamodule, such "
    "as PromptDataModule; the model is named by model_name_or_path",
    "ControlDataModule": "γ, learning rates and networks belong to the module, epochs and devices to lightning.Trainer",
    "LanguageArguments": "the model and its learning rate belong to the module, steps and devices to lightning.Trainer",
}
#: Where a group's options go in Python.
_OWNERS = {"data": "the datamodule's", "trainer": "the Trainer's"}


def in_python(name: str, known: Iterable[str]) -> str:
    """Returns a clause with the name here of another library's argument, in Python; "" if there is none."""
    if name == "seed":
        return "; the seed is the datamodule's seed"
    if name in INSTEAD:
        return f"; {INSTEAD[name]}"
    group, _, rest = MEANT.get(name, "").partition(".")
    if group == "model" and rest in known:
        return f"; did you mean {rest}{difference(name)}?"
    return f"; here it is {_OWNERS[group]} {rest}{difference(name)}" if rest and group in _OWNERS else ""


def difference(name: str) -> str:
    """Returns, in brackets, how the option here differs from the one with the foreign name; "" if it does not."""
    return f" ({DIFFERENT[name]})" if name in DIFFERENT else ""


def refuse_foreign_call(cls: type, args: tuple, arguments: dict[str, Any]) -> None:
    """Refuses arguments that a class does not take."""
    hint = next((ELSEWHERE[base.__name__] for base in cls.__mro__ if base.__name__ in ELSEWHERE), "")
    if args and isinstance(args[0], str) and args[0].endswith("Policy"):
        raise UsageError(
            f"{cls.__name__}({args[0]!r}, …) is Stable-Baselines3's call; here environments belong to a "
            f"datamodule: {three_lines(cls)}"
        )
    known = taken_by(cls)
    if known is None:
        return
    if (name := next((name for name in arguments if name not in known), None)) is not None:
        near = in_python(name, known)
        if not near and name in ("env", "policy"):
            near = f"; environments belong to a datamodule: {three_lines(cls)}"
        near = near or did_you_mean(name, known) + (f"; {hint}" if hint else "")
        raise UsageError(f"{cls.__name__} takes no argument {name!r}{near}")


class NoMethod:
    """A name of :data:`METHODS` on a class that has no such method."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> NoReturn:
        raise AttributeError(no_method(owner, self.name))


def no_method(cls: type, name: str) -> str:
    """Returns the sentence for another library's method or attribute."""
    return f"{cls.__name__} has no {name}; {METHODS[name]}"


def refuse_import(package: str, name: str) -> None:
    """Raises the sentence for another library's class; does nothing for any other name."""
    if name in CLASSES:
        raise ImportError(f"{package} has no {name}; {CLASSES[name]}", name=package)


def default_of(cls: type, name: str) -> Any:
    """Returns the default of an argument that a class or one of its bases declares."""
    constructors = [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)]
    declared = (inspect.signature(constructor).parameters.get(name) for constructor in constructors)
    return next(parameter.default for parameter in declared if parameter is not None)


def three_lines(cls: type) -> str:
    """Returns the lines of Python that train a control algorithm."""
    replays = getattr(getattr(cls, "experience", None), "kind", "") == "replay"
    continuous = [space.__name__ for space in getattr(cls, "supported_action_spaces", ())] == ["Box"]
    env = "Pendulum-v1" if continuous else "CartPole-v1"
    data = f"{'Replay' if replays else 'Rollout'}DataModule({env!r})"
    return f"data = {data}, model = {cls.__name__}(), recipes.Trainer().fit(model, data)"


def taken_by(cls: type) -> list[str] | None:
    """Names of the arguments of a class and of the bases that it passes ``**arguments`` to; None: any."""
    names: list[str] = []
    for base in cls.__mro__:
        if "__init__" not in vars(base) or base is object:
            continue
        if hasattr(base.__init__, "declares"):  # type: ignore[misc]
            return [*names, *cls.declared_settings]  # type: ignore[attr-defined]
        parameters = inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
        names += [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name != "self"]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return names
    return None
