"""Right and wrong calls, read and never run: checkers must refuse the lines that say so, and no other."""

from torch import Tensor, optim

from datamodules import (
    InstructionDataModule,
    PreferenceDataModule,
    PromptDataModule,
    ReplayDataModule,
    RolloutDataModule,
)
from rl_modules import (
    A2C,
    ARS,
    C51,
    DDPG,
    DPO,
    DQN,
    GRPO,
    KTO,
    PPO,
    PQN,
    QRDQN,
    REINFORCE,
    RLHFPPO,
    RLOO,
    SAC,
    SARSA,
    SFT,
    TD3,
    TQC,
    TRPO,
    CrossQ,
    DiscreteSAC,
    Distillation,
    MonteCarlo,
    QLearning,
    RecurrentA2C,
    RecurrentPPO,
    RewardModel,
)
from rl_modules.core.settings import changed, setting


def longest(prompts: list[str], completions: list[str], **columns: object) -> list[float | None]:
    return [float(len(text)) for text in completions]


def halves(rewards: Tensor) -> Tensor:
    return rewards / 2


class Careful(PPO):
    """An argument of one's own, another default, and a number of the moment."""

    loss_range: float = setting(default=0.1, says="ε of worse actions", above=0)
    gae_lambda = 0.9
    vf_coef: float = changed(default=0.2)

    def narrow(self) -> float:
        return min(self.loss_range, self.clip_range / 2)


class Own(PPO):
    """An ordinary constructor."""

    def __init__(self, bonus: float = 1.0, gamma: float = 0.9) -> None:
        super().__init__(gamma=gamma, clip_range="lin_0.2")
        self.bonus = bonus


PPO()
PPO(clip_range=0.1, gamma=1, learning_rate="lin_3e-4", target_kl=None, net_arch={"pi": [64], "vf": [64]})
PPO(optimizer=optim.Adam, network="my_package.Network", ent_coef="cosine_0.01", sde_sample_freq=-1)
A2C(normalize_advantage=True, max_grad_norm=None)
TRPO(target_kl="lin_0.01", cg_damping=0.1)
REINFORCE(psi="baseline")
RecurrentPPO(lstm_hidden_size=64, burn_in=4)
RecurrentA2C(rnn="gru")
PQN(q_lambda=0.5)
ARS(n_delta=4, delta_std="lin_0.05")
DQN(double=True, noisy=True, exploration_fraction=0.2)
QRDQN(n_quantiles=50, dueling=True)
C51(n_atoms=21, v_max=100)
SAC(ent_coef="auto_0.1", target_entropy=-3.0)
DiscreteSAC(target_entropy=0.3, learning_rate=lambda left: 1e-3 * left)
TD3(policy_delay=2, action_noise={"class_path": "NormalActionNoise", "init_args": {"sigma": 0.1}})
DDPG(tau=0.01)
TQC(n_quantiles=25, top_quantiles_to_drop_per_net=2)
CrossQ(policy_delay=3)
MonteCarlo(learning_rate="1/n")
SARSA(gamma=0.9)
QLearning(double=True, learning_rate=0.1)
SFT("folder", lora={"r": 16})
RewardModel("folder", center_rewards_coefficient=0.01)
DPO(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.1])
KTO(beta=0.1)
GRPO("folder", beta=0.1, scale_rewards=False, advantages=halves, sampler="vllm")
RLOO(beta=0.05)
RLHFPPO("folder", beta=0.1, value_head_on_policy=True)
Distillation("folder", teacher_model_name_or_path="teacher")
Careful(loss_range=0.2, clip_range=0.3)
Own(bonus=2.0)
RolloutDataModule("CartPole-v1", 8, n_steps=32, batch_size=None, env_kwargs={"max_episode_steps": 50})
ReplayDataModule("Pendulum-v1", train_freq=4, gradient_steps=-1, prioritized_replay_alpha=0.7)
PromptDataModule("addition", num_generations=8, reward_funcs=[longest, "exact_answer"], eval_path={"easy": "a.jsonl"})
PromptDataModule([{"name": "addition", "weight": 2}], dataset=None)
PreferenceDataModule("paths", batch_size=8)
InstructionDataModule(path="a.jsonl")
ratio: float = PPO().clip_range + 1
steps: int = RolloutDataModule().n_steps + 1

PPO(clip_rnge=0.1)  # refused
PPO(gamma="high")  # refused
PPO(clip_range=[0.2])  # refused
PPO(0.2)  # refused
A2C(policy_objective="clip")  # refused
DQN(exploration_fractoin=0.2)  # refused
SAC(n_critics="two")  # refused
QLearning(n_critics=2)  # refused
GRPO("folder", betta=1)  # refused
GRPO(num_generations=8)  # refused
GRPO(advantages=3)  # refused
DPO(loss_type=1)  # refused
SFT(lora="16")  # refused
RolloutDataModule(n_step=32)  # refused
RolloutDataModule("CartPole-v1", n_steps="many")  # refused
ReplayDataModule(buffer_size=None)  # refused
PromptDataModule(reward_funcs=1)  # refused
InstructionDataModule("addition", num_generations=8)  # refused
Careful(los_range=0.2)  # refused
Own(bonus="much")  # refused
